"""Checkpoints, which are complete or absent, and from which a run resumes.

    folder.py    which folders are checkpoints of ours, and how one appears and goes away: by a rename
    card.py      titanplans.json in each: the files with their checksums, the model, the job
    storage.py   torch's distributed checkpoints, written with checksums and read without running their pickles
    manager.py   torchtitan's CheckpointManager with these: saves whole checkpoints, loads checked ones
    match.py     whether a checkpoint belongs to the job, and from which one it goes on
    published.py the last step as a Hugging Face folder
    weights.py   where an export reads: a checkpoint, a Hugging Face folder, adapters on either
    export.py    a checkpoint, or adapters and their base, to a Hugging Face folder
    convert.py   a Hugging Face folder to a checkpoint

Importing the package imports nothing.
"""
