"""CPU replacements for recurrent kernels: linear attention, state spaces, RWKV, and their gates."""
