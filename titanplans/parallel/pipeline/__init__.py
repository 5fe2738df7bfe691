"""Pipelines: how blocks are shared out over stages, when each stage computes, and a picture of it."""
