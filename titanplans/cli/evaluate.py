"""`titanplans evaluate JOB`: print a checkpoint's validation loss and perplexity, one line for each source of the data."""

from titanplans.training.launch.main import main as run


def main(argv: list[str]) -> int:
    """Validate the checkpoint of the job that `argv` describes; return the exit status."""
    return run(argv, "evaluate")
