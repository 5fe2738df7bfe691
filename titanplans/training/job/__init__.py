"""Check and resolve a job before it runs: `check_job` in `checks.py`, values of unset options in `resolve.py`."""
