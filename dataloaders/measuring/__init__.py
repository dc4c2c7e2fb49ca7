"""Clocks, queues and intervals, for the check, tuning and the bench.

intervals.py  the block bootstrap: an estimate with its 95 % interval
queues.py     how full the queues behind an iterator are
"""
