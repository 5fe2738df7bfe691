"""Muon, of whole matrices, however they are sharded: the optimizer, its products, and its communication."""

from titanplans.parallel.optimizers.muon.optimizer import Muon

__all__ = ["Muon"]
