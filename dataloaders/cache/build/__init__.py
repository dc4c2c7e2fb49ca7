"""Build a cache: from a dataset to finished parts, and from these to one cache.

    dataset ──study.py, elsewhere (observed.py)──> findings.py ──> estimation.py, fingerprint.py
    range of samples ──workers.py──> rows.py ──> a finished part      parts.py: names, what is there
    all parts ──combining.py, joining.py──> train.h5                  locks.py: one builder at a time

builder.py      precompute(), estimate()             study.py        a few samples, read before
findings.py     what they tell                       observed.py     ... in a process of its own
fingerprint.py  what a cache is made of              estimation.py   size, time, rows of a part
advice.py       why rows are large                   rows.py         samples -> one part
reading.py      one sample -> cells                  seeds.py        generators: seeded, drawn from
workers.py      a pool of processes                  failure.py      errors on their way from there
parts.py        the folder of parts                  locks.py        filelock, and who has it
combining.py    the columns of parts as one's        joining.py      join(), merge()
progress.py     how far a build is                   opening.py      a finished cache, unread
"""
