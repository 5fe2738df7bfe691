"""A package of one's own, beside titanplans: a model, its plan, its sizes."""
