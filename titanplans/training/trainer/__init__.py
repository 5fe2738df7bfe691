"""The training loop, in `trainer.py`, and its parts."""
