"""Guards of a split model's calls: which inputs and methods work, and which are refused."""
