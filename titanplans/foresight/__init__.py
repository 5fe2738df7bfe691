"""A job on fake tensors: what a step allocates, and what CUDA's caching allocator reserves for it. Start at `rehearsal`."""
