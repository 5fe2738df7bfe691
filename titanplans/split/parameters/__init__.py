"""Parameters that are DTensors for the optimizer and plain local tensors for a module's code.

Start at `split.module_weight`. This package has shards of full tensors, selections of rows, the loading of
states, and parameters that the split has replaced.
"""
