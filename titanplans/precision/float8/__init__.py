"""Float8 products by torchao.

`conversion` says which Linear modules are converted, and checks that they are used; `all_gather` lets FSDP2 gather
their weights in float8; `scales` computes the scales of all weights in one reduction. How a converted module is split
is in `titanplans.precision.float8.linear`.
"""
