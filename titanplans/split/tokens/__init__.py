"""Context parallelism: a rank holds all weights and its tokens, and exchanges them for heads around a mixer's kernel."""
