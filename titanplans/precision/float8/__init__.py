"""Float8 training with torchao. Start at `conversion`, which selects and converts Linear modules.

`linear` splits a converted module over ranks. `border` gathers activations in float8, and `all_gather` lets FSDP2 gather
weights in float8. `scales` computes the scales of all weights in one reduction.
"""
