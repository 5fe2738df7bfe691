"""Context parallelism: a rank has all weights and its tokens. Around a mixer's kernel it exchanges tokens for heads."""
