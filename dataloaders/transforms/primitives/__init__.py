"""The deterministic steps that torchvision's transforms consist of, done by its own functions.

    geometry.py  crop, pad, resize, flip
    turns.py     rotate, affine, perspective
    erasing.py   a rectangle overwritten
    fills.py     the colour of what lies outside of an image
    colour.py    brightness, contrast, hue, grey, blur, tables of levels
    auto.py      shears, shifts and turns of the automatic policies; AugMix's mixing
    elastic.py   each pixel moved by a smooth random field
    convert.py   from PIL images to tensors, from bytes to floats

torchvision is imported when a step is done, not here.
"""
