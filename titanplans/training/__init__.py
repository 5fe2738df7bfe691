"""Train a job from a TOML file: `launch/` starts it, `job/` checks it, `trainer/trainer.py` has the training loop.

Importing this package imports nothing. Only `cli` imports from it, as its modules need torchtitan.
"""
