"""Ask about this machine, and control its threads and page cache.

resources.py   cores, memory and shared memory, divided by the ranks on the machine
facts.py       facts about the machine for readers of measured figures
page_cache.py  the parts of a file that the kernel keeps in memory
threads.py     background threads: torch's share of the cores, CUDA graph capture
"""
