"""CPU replacements for softmax attention, sparse attention, decoding steps and rotary embeddings."""
