"""An experiment is a TOML file and a table: a grid of jobs, run one after another, and what came of each.

    titanplans sweep configs/experiments/tp_variants.toml

`spec` reads the file, `cells` makes the jobs, `record` knows which of them are done, `process` runs one, `figures` reads
what it measured, `table` and `plot` show it, `main` is the command line. A cell is a `titanplans train` of its own; nothing
here imports torchtitan.
"""
