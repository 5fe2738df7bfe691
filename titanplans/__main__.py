"""`python -m titanplans`, the same as `titanplans`: see `titanplans.cli.main`."""

from titanplans.cli.main import run

if __name__ == "__main__":
    run()
