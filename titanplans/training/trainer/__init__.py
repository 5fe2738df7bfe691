"""The training loop (`trainer.py`) and what it uses: model, loss, optimizers, metrics, reports, memory checks."""
