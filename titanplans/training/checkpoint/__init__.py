"""Checkpoints, which are complete or absent, and from which a run resumes.

`manager.py` saves and loads them in a job, `match.py` says from which one a job goes on; `export.py` and `convert.py` make
Hugging Face folders of them, and them of those.
"""
