"""The whole model's training and the split one's, compared quantity by quantity."""
