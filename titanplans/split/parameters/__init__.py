"""Parameters that are DTensors for the optimizer and plain local tensors for a module's code.

Start at `split.module_weight`. Here: shards of full tensors, selections of rows, loading, parameters replaced by the
split.
"""
