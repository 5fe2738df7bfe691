"""`titanplans`, also `python -m titanplans`: see `titanplans.cli.main`."""

import sys

from titanplans.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
