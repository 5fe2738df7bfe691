"""Norms, convolutions, activations, losses and the other layers around a mixer."""
