"""seed=: random numbers as a function of where they are drawn.

philox.py  numbers from (seed, epoch, index, occurrence, draw)
seeded.py  a loader whose order and samples are drawn from these
states.py  restore the process-wide generators after a trial
"""
