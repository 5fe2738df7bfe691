"""`titanplans plot`: losses, norms and tokens/s of runs, or a sweep's table, in the terminal or as a picture."""
