"""Work with batches: any nesting of tensors.

tree.py       walk a batch: map, count, copy to a device
collation.py  make a batch as torch's workers do; whether torch's collation is unmodified
whole.py      a collate_fn that makes a batch at once, from row numbers
memory.py     host memory for batches, recycled when nothing refers to it
"""
