"""The deterministic steps of torchvision's crops, flips and resizes, by its own functions."""
