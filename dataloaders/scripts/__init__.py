"""Somebody's unmodified training script, run here with its loops over loaders watched.

target      a script or module, run as python itself would run it
takeover    its loops: one loader is handed to a measurement, the others pass untouched
switch      its torch loaders, on another backend
"""
