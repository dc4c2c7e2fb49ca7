"""Recorded calls, done to pixels.

evaluate.py  any step, one by one, exactly as the dataset's own code
"""
