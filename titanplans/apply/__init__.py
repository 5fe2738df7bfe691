"""Check a plan against a model (`check_plan`), or check it and split the model (`apply_plan`)."""
