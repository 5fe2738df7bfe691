"""Side-by-side figures, each script prints a table: `python -m benchmarks.NAME`."""

from titanplans.quiet import silence

silence()  # before the script imports a library
