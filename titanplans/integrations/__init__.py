"""Split models in the training loops of other libraries: Hugging Face's Trainer, TRL, torchtitan, NeMo Automodel."""
