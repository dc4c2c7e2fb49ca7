"""Read a cache: rows out of mapped files, restored to what the dataset gave.

    train.h5 ──reader.py──> columns.py ──────────────────────────> leaves ──> sample
                        └─> joined.py ──part of a row──> columns.py ──┘

reader.py   CachedDataset                     columns.py       the leaves of one column
joined.py   the columns of all parts          shards.py        opening the parts that a file names
pieces.py   values out of compressed chunks   limits.py        what a row may take in memory
mapping.py  a mapped file                     verification.py  verify(): finds any flipped bit
"""
