"""Split models in the training loops of other libraries: Hugging Face's Trainer and TRL, and torchtitan's own entry."""
