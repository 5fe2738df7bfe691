"""`titanplans verify`: a name, a job or a config.json becomes a model, which is proved; the result is printed.

Importing the package imports nothing.
"""
