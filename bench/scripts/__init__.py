"""The check on whole training scripts: ours, and those of others."""
