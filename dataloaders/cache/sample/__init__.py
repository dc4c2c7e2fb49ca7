"""What a sample consists of, and which part of it a cache keeps.

    dataset ──cut.py, packed.py──> a row ──sample.py, cell.py──> structure and cells
    PIL image ──cell.py, encoding.py (images.py says how)──> cell ──decode.py──> image

cut.py       head and tail of a Compose          packed.py    a dataset's own files as rows
sample.py    nested sample <-> structure, cells  cell.py      one leaf <-> kind and array
images.py    images= as a user gives it          encoding.py  images -> encoded cells
decode.py    encoded cells -> images             palette.py   images of mode P as PNG files
"""
