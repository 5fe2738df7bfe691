"""Pipelines: a model cut into stages of consecutive blocks; each keeps the model's own forward."""
