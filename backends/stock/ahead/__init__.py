"""Epochs that the prefetch thread takes, while samplers stay on the consumer's thread.

workers.py      torch's worker processes: results on the thread, tasks sent by the consumer
gather.py       datasets of tensors in memory, gathered on the thread itself
"""
