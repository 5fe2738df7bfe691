"""Plans of flash-linear-attention's models, and of its mixers in any hybrid model."""
