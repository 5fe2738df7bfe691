"""WHAT a plan is: `TPPlan`, its styles, the registry, a model's decoder, and the checks of a plan against a model.

The plans themselves are in `plans/`, one small file an architecture. Nothing here imports a model library or a
plan by name: it reads the names of modules and of their classes.
"""
