"""A sample made of stand-ins: encoded files, calls with their drawn arguments, and the rest.

    dataset[i] ──> Image.open, decode_* ──> stand-in (bytes, size, mode) ──> calls are written down
    collate_fn ──> a nesting with stand-ins ──> RecordedBatch ──> replaying/

program.py  what is written down, and how it travels
image.py    stand-ins of Pillow's images
tensor.py   stand-ins of tensors
hooks.py    where stand-ins come from, and the functions that are recorded
ops.py      each recorded step, done for real
worker.py   a loader whose workers record
ring.py     shared memory for a batch's files, used again
tail.py     only the steps that make floats of bytes and end a sample

Neither Pillow nor torchvision is imported before a worker records.
"""
