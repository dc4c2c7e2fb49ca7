"""What this machine has for one rank, and what its threads do.

resources.py   cores, memory and shared memory, divided by the ranks on the machine
facts.py       what a reader of measured figures needs to know of the machine
page_cache.py  what the kernel keeps of a file in memory
threads.py     threads of ours: torch's share of the cores, CUDA's captures
waiting.py     waits of the main thread that Ctrl-C ends
"""
