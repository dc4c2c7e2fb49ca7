"""What a cache costs to build and to read."""
