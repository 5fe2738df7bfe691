"""What async tensor parallelism would fuse, decided on graphs without a GPU.

`capture` compiles blocks as far as inductor's passes, `chains` finds the matrix products next to a collective, `verdict`
says of each collective whether it was fused, or which obstacle there is. The caller prepares the model.
"""
