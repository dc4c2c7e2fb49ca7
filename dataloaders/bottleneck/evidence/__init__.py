"""From measured blocks to a verdict.

blocks ──corrections──> blocks that compare ──estimates──> real / synthetic ──verdict──> its name
"""
