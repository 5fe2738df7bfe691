"""`titanplans sweep SWEEP.toml`: see `titanplans.cli.sweep.main`."""

import sys

from titanplans.cli.sweep.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
