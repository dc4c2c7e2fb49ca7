"""seed=: random numbers as a function of where they are drawn.

words.py   random bits from (seed, epoch, index, occurrence, draw)
seeded.py  a loader whose order and samples are drawn from them
states.py  restore the process-wide generators after a trial
"""
