"""The training loop (`trainer.py`), with its model, loss, optimizers, metrics and reports, and the memory check."""
