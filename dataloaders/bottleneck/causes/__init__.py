"""Finds, once the verdict stands, where the time goes and what changes would gain.

causes        the order of the search, its time limits; remedies tried with the step
preparation   samples, timed by calls in a process of their own
profile       which call a thread is in
cold          batches whose files were evicted from memory
settings      settings of the step, tried in turn
"""
