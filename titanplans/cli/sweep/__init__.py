"""`titanplans sweep`: a grid of jobs from a TOML file, run one after another, with a table of their results.

    titanplans sweep configs/experiments/tp_variants.toml

`spec` reads the file, `cells` makes the jobs and keeps the record of each, `main` runs them, `table` writes the results. A
cell is a `titanplans train` process; nothing here imports torchtitan.
"""
