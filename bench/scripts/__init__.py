"""The check on whole training scripts."""
