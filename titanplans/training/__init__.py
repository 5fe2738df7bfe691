"""Train a job from a TOML file: `launch/` starts it, `job/` checks it, `trainer/trainer.py` has the training loop.

Importing this package imports none of its modules, since these need torchtitan. Of the other packages only `cli` imports
from it.
"""
