"""`titanplans verify`: a name, a job or a config.json becomes a model, `titanplans.proof` proves it; the result is printed.

Importing the package imports nothing.
"""
