"""A job on fake tensors: what a step allocates, and what CUDA's caching allocator makes of it. Start at `rehearsal`."""
