"""Work with batches: any nesting of tensors.

tree.py       walk a batch: map, count, copy to a device
collation.py  whether torch's default collation is unmodified
whole.py      a collate_fn that makes a batch at once, from row numbers
memory.py     host memory for batches, recycled when nothing refers to it
"""
