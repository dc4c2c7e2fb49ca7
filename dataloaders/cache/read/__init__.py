"""Read a cache: rows out of mapped files, restored to what the dataset gave.

    train.h5 ──reader.py──> files.py ──part of a row──> columns.py ──> leaves ──> sample

reader.py   CachedDataset                     columns.py  the leaves of one column of one file
files.py    all files, mapped; their columns  shards.py   opening the parts that a file names
verification.py  verify(): flipped bits          notes.py    which cache is that of a dataset
"""
