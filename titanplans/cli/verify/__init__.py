"""`titanplans`: the command line of the proof. Reads what to prove, builds it, proves it, says what came out.

What a proof is stands in `titanplans.proof`, which knows no model library; how to get from a name, a job or
a config.json to a model stands here. Importing the package imports nothing.
"""
