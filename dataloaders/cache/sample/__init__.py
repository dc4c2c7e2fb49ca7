"""What a sample consists of, and which part of it a cache keeps.

    dataset ──cut.py, packed.py──> a row ──sample.py, leaf.py──> structure and leaves
    PIL image ──leaf.py, encoding.py (images.py says how)──> leaf ──decode.py──> image

cut.py       head and tail of a Compose           packed.py   a dataset's own files as rows
sample.py    nested sample <-> structure, leaves  leaf.py     a value <-> its kind and array
images.py    images= as a user gives it           encoding.py images -> encoded leaves
decode.py    encoded leaves -> images             palette.py  images of mode P as PNG files
"""
