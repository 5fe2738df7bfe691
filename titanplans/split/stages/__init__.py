"""Stages: a model cut into runs of consecutive blocks; each keeps the model's own forward."""
