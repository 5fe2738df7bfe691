"""CPU replacements for norms, short convolutions, activations, losses and other layers around a mixer."""
