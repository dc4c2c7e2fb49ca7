"""Build a cache: from a dataset to finished parts, and from these to one cache.

    dataset ──study.py, elsewhere──> findings ──> estimation.py, fingerprint.py
    range of samples ──workers.py──> rows.py ──> a finished part      parts.py: names, what is there
    all parts ──combining.py, joining.py──> train.h5                  locks.py: one builder at once

builder.py      precompute(), estimate()             ranks.py        waiting for the other ranks
source.py       options; the dataset of a cache, opened without a look where one is finished
study.py        a few samples, read before           estimation.py   size, time, rows of a part
fingerprint.py  what a cache is made of              rows.py         samples -> one part
advice.py       why rows are large                   seeds.py        generators: seeded, drawn from
reading.py      one sample -> cells, or its error    locks.py        filelock, and who has it
workers.py      torch's workers make parts           joining.py      join(), merge()
parts.py        the folder of parts                  progress.py     how far a build is
combining.py    the columns of parts as one's
"""
