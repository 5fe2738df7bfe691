"""Read text and conversations, and make batches that any number of ranks can resume exactly.

A document passes through `corpus/local.py` (fragments of files), `corpus/sources.py` (the order of an epoch),
`packed_source.py` (tokens), `packing.py` (sequences), `batches.py` (a rank's slice of a global batch) and `loader.py`.
`positions.py` says which reader a sequence comes from, and what a checkpoint records; `resume.py` continues from that.
"""
