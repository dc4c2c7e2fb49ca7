"""Derive a verdict from measured blocks.

blocks ──corrections──> blocks that compare ──estimates──> real / synthetic ──verdict──> its name
"""
