"""A coverage-guided fuzzer of what reads caches: ``python tests/fuzz``, or ``make fuzz``.

    seeds ──> mutation ──> target ──> guard: a value or a CacheError, else a finding
      ^       (JSON, sizes,   │
      └───────  digest)  new coverage is kept

    seeds.py     sound files to begin with     mutation.py  spoils them, and seals them again
    sealed.py    a cache as index and bytes    targets.py   what is called with them
    guard.py     what must not happen          one.py       a target under Atheris (libFuzzer)

Atheris counts the branches. Without it, the targets and the mutations are plain Python: the tests
run them for a moment, and ``--input FILE`` repeats a finding.
"""
