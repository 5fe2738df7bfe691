"""Contradictions between options: every refusal that follows from options alone.

One function a group of options, which yields each option that is refused, and the reason with the remedy. A group names its
function where it is declared (`refuses=`), so a job, a strategy in Python and the command line refuse alike. What depends on
the mesh, the device or the model is refused by `strategy.check_on_mesh`, whose facts `parallelize` knows.
"""
