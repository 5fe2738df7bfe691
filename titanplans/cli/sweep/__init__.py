"""`titanplans sweep`: a grid of jobs from a TOML file, run one after another, with a table of their results.

    titanplans sweep configs/experiments/tp_variants.toml

`spec` reads the file, `cells` makes the jobs, `record` stores the state of each, `process` runs one, `figures` reads what
it measured, `table` and `plot` write the results, `main` is the command line. A cell is a `titanplans train` process;
nothing here imports torchtitan.
"""
