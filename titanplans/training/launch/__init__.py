"""Start a job: `main.py` reads the command line, `launcher.py` starts the ranks, `rank.py` runs one of them."""
