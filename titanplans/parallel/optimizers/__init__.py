"""Optimizers of split and sharded parameters: their groups, and Muon."""
