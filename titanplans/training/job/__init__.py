"""Check a job before it runs (`check_job` in `checks.py`), and determine values that it leaves open (`resolve.py`)."""
