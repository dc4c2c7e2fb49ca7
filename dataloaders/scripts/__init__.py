"""Somebody's unmodified training script, run here with its loops over loaders watched.

target      a script or module, run as python itself would run it; how it ended
stopping    ended from inside, in whichever thread it waits
loops       every iter() of a DataLoader
optimizers  steps of every optimizer: the loop in which one steps is the one that trains
takeover    one loop is handed to a measurement, the others pass untouched
ranks       several ranks: one schedule, one report
children    processes that it starts to train in
scratch     files that existed before stay as they are
switch      its torch loaders, on another backend
"""
