"""Guards: a split model refuses what it would compute wrongly without a word.

`dropout` refuses before the split; `first_forward` checks once what is known only when the model is called; `inputs` checks
the arguments of each call; `unsupported_methods` refuses methods that take shards for full tensors.
"""
