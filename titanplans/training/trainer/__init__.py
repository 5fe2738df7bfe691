"""torchtitan's Trainer with this project's differences."""
