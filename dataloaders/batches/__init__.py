"""What a batch is, and how one is made: any nesting of tensors.

tree.py       the leaves of a batch: mapped over, counted, copied to a device
collation.py  whether torch's default collation is still torch's
whole.py      a collate_fn that makes a batch at once, from row numbers
memory.py     host memory for batches, used again when nobody holds it
synthetic.py  batches that look like real ones
"""
