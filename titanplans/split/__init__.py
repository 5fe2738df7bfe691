"""The tools of a split model: the stream and its borders, collectives, local tensors of parameters, guards."""
