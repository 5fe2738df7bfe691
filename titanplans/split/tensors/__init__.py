"""The cut by weights: each style's parameters, borders and sums on the ranks of tensor parallelism."""
