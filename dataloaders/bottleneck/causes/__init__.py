"""Find out, once there is a verdict, where the time goes and what changes would gain.

causes        runs the search within its time limits; tries changes with the step
preparation   times the calls that prepare samples, in a separate process
profile       samples which call a thread is in
cold          measures batches whose files were evicted from memory
settings      tries settings of the step, in turns
"""
