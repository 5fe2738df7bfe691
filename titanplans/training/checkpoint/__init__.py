"""Checkpoints of a job: saved by `manager.py`, described by a manifest (`manifest.py`), chosen by `resume.py`.

`match.py` compares a checkpoint with the job. `export.py` converts to Hugging Face folders, `convert.py` from them.
"""
