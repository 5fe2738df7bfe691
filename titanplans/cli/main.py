"""One command, with a word for what to do.

    titanplans train configs/gla_debug.toml               # train the job; the same as train.py
    titanplans verify gla                                 # prove a plan at every degree, on a CPU
    titanplans verify my_plans:MyPlan --model my_models:build
    titanplans list                                       # the registered plans
    titanplans async-tp gla --tp 2                        # which collectives async TP would fuse
    titanplans sweep configs/experiments/tp_variants.toml # a grid of jobs, and a table of them

Each command's own options: `titanplans COMMAND --help`.
"""

import os
import sys

COMMANDS = ("train", "verify", "list", "async-tp", "sweep")


def run() -> int:
    """Do what this process's arguments say; return the exit status, or leave at once with it."""
    command, *rest = sys.argv[1:] or ["--help"]
    if command in ("-h", "--help"):
        print(__doc__)
        return 0
    if command == "train":
        from titanplans.training.main import main as train

        return train(rest)
    if command == "sweep":
        from titanplans.cli.sweep.main import main as sweep

        return sweep(rest)
    if command not in COMMANDS:
        print(f"error: {command}: no such command; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    # Both are read when the libraries are imported.
    if "--process-group" in rest:
        # Triton's dot products round float32 to TF32 otherwise, 10 bits of 23.
        os.environ["TRITON_F32_DEFAULT"] = "ieee"
    elif command != "async-tp":  # which captures what the compiler makes
        # Simulated ranks run eagerly. What a library compiles at import time would only import the compiler.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"

    from titanplans.cli.verify.main import main as verify
    from titanplans.training.outcome import exit_now

    exit_now(verify([command, *rest]))  # Python's clean-up of these libraries takes a second
    return 0
