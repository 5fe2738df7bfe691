"""Muon for matrices with any sharding: the optimizer, its Newton-Schulz iteration on full matrices, its communication."""

from titanplans.parallel.optimizers.muon.optimizer import Muon

__all__ = ["Muon"]
