"""A user's package for titanplans: a model, its plan and its sizes."""
