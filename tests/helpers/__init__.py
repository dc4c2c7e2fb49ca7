"""Shared by the test modules: datasets, processes, and the contract that every backend keeps."""
