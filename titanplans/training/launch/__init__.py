"""Start a job: from the command line (`main.py`) to the ranks (`rank.py`) and to an exit status."""
