"""Benchmarks that compare variants in one run and print a table: `python -m benchmarks.NAME`."""

from titanplans.quiet import silence

silence()  # before the script imports libraries
