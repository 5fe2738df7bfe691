"""Text in, batches out: corpora, the committed tokenizer, packing, and a loader that resumes exactly.

A document of text on its way into a batch: `corpus/local.py` (a fragment of a file), `corpus/sources.py` (the order of an
epoch), `packed_source.py` (tokens), `packing.py` (sequences), `batches.py` (a rank's slice of a global batch), `loader.py`.
`positions.py` is the arithmetic of who reads what, and what a checkpoint holds of it; `resume.py` takes that up again.
"""
