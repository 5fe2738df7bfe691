"""Muon for matrices with any sharding, computed from full matrices: the optimizer, its products, its communication."""

from titanplans.parallel.optimizers.muon.optimizer import Muon

__all__ = ["Muon"]
