"""The door: a plan onto a model, strictly. `check_plan` refuses, `apply_plan` refuses or splits."""
