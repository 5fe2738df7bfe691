"""Checks of a plan against a model: what strict application refuses before anything moves."""
