"""Helpers of the tests: models, plans, faults, process groups, jobs, and the programs that write docs/generated."""
