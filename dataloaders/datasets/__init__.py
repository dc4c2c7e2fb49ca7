"""The encoded files behind a dataset.

files.py              what a dataset would decode, by index: bytes, and the target beside it
torchvision_files.py  where torchvision's own datasets have their files
nested.py             Subset, ConcatDataset and the like: one walk through them
"""
