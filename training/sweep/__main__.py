"""`python -m training.sweep SWEEP.toml`: see `training.sweep.main`."""

import sys

from training.sweep.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
