"""Measure time, queues and intervals, for the check, tuning and the bench.

clocks.py     reads the host's time, and the time lines of devices that run behind it
feed.py       yields a loader's batches without end; knows the state of its queues
queues.py     counts the batches of an iterator that are ready
intervals.py  computes 95 % intervals by the block bootstrap
progress.py   shows how far a measurement is, in one line
table.py      formats tables as plain text
"""
