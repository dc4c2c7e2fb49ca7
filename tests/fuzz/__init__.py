"""A fuzzer of what reads caches, which test_fuzz.py runs: a moment by day, longer by night.

sound files ──> damage ──> target, under a guard: a value or a CacheError, else a finding
"""
