"""Contradictions between options.

There is one function for each group of options. It yields each refused option, with the reason and the remedy. A group names
its function where it is declared (`refuses=`), so a job, a strategy in Python and the command line refuse the same values.
`strategy.check_on_mesh` refuses options that contradict the mesh, the device or the model.
"""
