"""The bytes of a file of a cache; docs/cache-format.md is its specification.

    entries, blocks ──writing.py──> hdf5.py: names, types, places ──> values ──> checksums.py
                                ──> index.py: sealed by block.py in front of all

block.py       the leading block, its digest         index.py         what the index says
entries.py     columns, places, parts in it          entry_checks.py  the same, of anybody's file
fields.py      JSON of anybody, field by field       writing.py       a whole file, written
hdf5.py        the HDF5 file around the values       checksums.py     of each 64 KiB
compress.py    compress= as a user gives it          codecs.py        HDF5's filters, in Python
attributes.py  classes and class_to_idx              changes.py       between fingerprints
disk.py        room, writing, syncing
"""
