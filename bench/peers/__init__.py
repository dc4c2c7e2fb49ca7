"""Other ways to do what this package does, each in the fast form that its documentation shows.

readers.py      precomputed images: h5py, np.memmap, DALI
check.py        whether a reader's batches are what was asked for, to the pixel
photos.py       JPEG files: DALI, as its own examples write the pipeline
"""
