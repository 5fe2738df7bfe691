"""Train a job from a TOML file: `launch/` starts it, `job/` checks it, `trainer/trainer.py` has the training loop.

Importing this package imports none of its modules. Only `cli` imports from it, since its modules need torchtitan.
"""
