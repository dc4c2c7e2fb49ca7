"""Find the encoded files of a dataset.

files.py              what a dataset would decode, by index: bytes and target
torchvision_files.py  where torchvision's own datasets have their files
nested.py             walk through Subset and ConcatDataset
"""
