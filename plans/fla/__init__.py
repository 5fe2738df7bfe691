"""Plans of flash-linear-attention's models, and of its mixers wherever a hybrid model holds them."""
