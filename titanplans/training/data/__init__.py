"""Read text and conversations as batches, which can be resumed exactly on any number of ranks.

A document passes through `corpus/local.py` (documents from files), `corpus/sources.py` (the order of an epoch),
`packed_source.py` (tokens), `packing.py` (sequences), `batches.py` (a rank's slice of a global batch) and `loader.py`.
`positions.py` determines the reader of each sequence and the position that a checkpoint records; `resume.py` continues
from that position.
"""
