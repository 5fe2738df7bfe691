"""The language of plans: `TPPlan`, its styles, the registry, and the checks of a plan against a model.

The plans themselves are in `plans/`. Nothing here imports a model library or a plan by name. Start at `plan.py`.
"""
