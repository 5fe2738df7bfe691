"""Guards: checks that refuse what a split model would compute wrongly without an error.

`dropout` checks before the split, `first_forward` once when the model is first called, `inputs` the arguments of each
call, and `unsupported_methods` replaces methods that take shards for full tensors.
"""
