"""Contradictions between options.

Each group of options has a function here, which yields each refused option with the reason and the remedy. The class of
the group names its function (`refuses=`), so a job, a strategy in Python and the command line refuse the same values.
`strategy.check_on_mesh` refuses options that contradict the mesh, the device or the model.
"""
