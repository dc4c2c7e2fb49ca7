"""Finds, once the verdict stands, where the time goes and what changes would gain.

causes        in which order, within which time; remedies tried with the step
preparation   samples timed by calls in a process of its own      profile: the calls
cold          files evicted from memory                           settings: tried around the step
"""
