"""`titanplans verify`: a name, a job or a config.json becomes a model, is proved (`titanplans.proof`), and the result printed.

Importing the package imports nothing.
"""
