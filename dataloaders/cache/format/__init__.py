"""The bytes of a file of a cache; docs/cache-format.md is its specification.

    entries, blocks ──writing.py──> hdf5.py: names, types, places ──> values ──> checksums.py
                                ──> index.py: sealed by block.py in front of all

block.py      the leading block, its digest      index.py       what the index says, checked
entries.py    columns, places, parts in it       fields.py      untrusted JSON, as it is annotated
hdf5.py       the HDF5 file around the values    writing.py     a whole file, written
checksums.py  of each 64 KiB                     codecs.py      HDF5's filters, in Python
compress.py   compress= as a user gives it       attributes.py  classes and class_to_idx
changes.py    between fingerprints               disk.py        room, writing, syncing
"""
