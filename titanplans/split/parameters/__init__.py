"""Parameters that are DTensors to the optimizer and plain local tensors to a module's code."""
