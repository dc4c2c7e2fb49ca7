"""Run a user's unmodified training script in this process, and watch its loops over loaders.

target      runs a script or module as ``python`` would; returns how it ended
stopping    ends the script from inside, from any of its threads
loops       replaces iter() of every DataLoader
optimizers  counts optimizer steps: the loop in which one steps is the training loop
takeover    hands that loop to a measurement, and leaves the others alone
ranks       keeps several ranks on one schedule, with one report
children    measures, or switches, in processes that the script starts to train in
scratch     protects files that existed before
switch      iterates the script's torch loaders by another backend
"""
