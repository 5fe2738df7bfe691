"""Checkpoints of a job: `manager.py` saves them, each with a manifest (`manifest.py`); `resume.py` chooses one to load.

`match.py` compares a checkpoint with the job. `export.py` converts checkpoints to Hugging Face folders, and `convert.py`
converts such folders to checkpoints.
"""
