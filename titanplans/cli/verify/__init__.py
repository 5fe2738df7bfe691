"""`titanplans verify`: reads what to prove, builds the models, runs the proof, prints the result.

The proof itself is in `titanplans.proof`, which imports no model library. How a name, a job or a config.json becomes a
model is here. Importing the package imports nothing.
"""
