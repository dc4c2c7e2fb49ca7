"""A user's unmodified training script, run in this process, with its loops over loaders watched.

target      runs a script or module as python itself would; returns how it ended
stopping    ends the script from inside, in any of its threads
loops       replaces iter() of every DataLoader
optimizers  counts optimizer steps: the loop in which one steps is the one that trains
takeover    hands that loop to a measurement, and leaves the others alone
ranks       keeps several ranks on one schedule, with one report
children    reaches processes that the script starts to train in
scratch     protects files that existed before
switch      iterates the script's torch loaders by another backend
"""
