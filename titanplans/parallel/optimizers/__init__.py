"""Optimizers for split and sharded parameters: parameter groups, Muon, load balancing of experts."""
