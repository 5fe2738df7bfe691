"""Softmax attention, plain, sparse and in parts, and rotary embeddings."""
