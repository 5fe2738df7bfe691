"""Parameters that are DTensors to the optimizer and plain local tensors to a module's code: start at `split.module_weight`.

`shards` takes this rank's shard of a full tensor; `selection` takes the rows that a rank needs of a stored weight;
`loaded_state` loads full tensors, and refuses another rank's shards; `replaced` retires the parameters that were there
before the split.
"""
