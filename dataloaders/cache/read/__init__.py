"""Read a cache: rows of mapped files become the samples that the dataset gave.

    row ──reader.py──> files.py ──the part that holds it──> columns.py ──> leaves ──> sample

reader.py        CachedDataset                     files.py    all files, mapped; their columns
columns.py       the leaves of a column in a file  shards.py   opens the parts that a cache names
verification.py  verify(): any flipped bit         notes.py    which cache belongs to a dataset
"""
