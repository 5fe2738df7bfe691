"""The conditions of a proof, and the batches that bring a model into them."""
