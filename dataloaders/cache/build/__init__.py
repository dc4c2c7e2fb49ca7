"""Build a cache: from a dataset to finished parts, and from these to one cache.

    dataset ──study.py, elsewhere──> findings ──> source.py, estimation.py
    range of samples ──workers.py──> rows.py ──> a finished part      parts.py: names, what is there
    all parts ──combining.py, joining.py──> train.h5                  locks.py: one builder at once

builder.py      precompute(), estimate(); ranks      workers.py      torch's workers make parts
source.py       options; the dataset of a cache: its fingerprint; opened where one is finished
study.py        a few samples, read before           estimation.py   size, time, rows of a part
reading.py      one sample -> leaves, or its error;  rows.py         samples -> one part
                whether it drew random numbers       parts.py        the folder of parts
combining.py    the columns of parts as one's        joining.py      one file of parts; merge()
locks.py        one builder a cache, by filelock     progress.py     how far a build is
"""
