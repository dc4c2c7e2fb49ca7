"""Clocks, queues, feeds and intervals, for the check, tuning and the bench.

clocks.py     the host's time, and the time lines of devices that run behind it
feed.py       a loader without an end, and the state of its queues
queues.py     how many batches of an iterator are ready
intervals.py  the block bootstrap: an estimate with its 95 % interval
progress.py   a line that shows how far a measurement is
table.py      tables as plain text
"""
