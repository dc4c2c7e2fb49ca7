"""A fuzzer of what reads caches: ``python tests/fuzz TARGET``, or ``make fuzz``.

    sound files ──> damage ──> target ──> guard: a value or a CacheError, else a finding
      ^                          │
      └── Atheris: new branches ─┘

Targets, damage and guard are plain Python: the tests run them for a moment without Atheris.
"""
