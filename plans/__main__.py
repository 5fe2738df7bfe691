"""Prove a plan, list the plans, or decide what async tensor parallelism would fuse.

    python -m plans verify gla                           # every degree and option, simulated on a CPU
    python -m plans verify configs/gla_debug.toml        # as the job splits it
    python -m plans verify my_plans:MyPlan --model my_models:build
    python -m plans list
    python -m plans async-tp gla --tp 2                  # which collectives async TP would fuse

The only file of this package that looks up the house: the command line's rooms are `training/verify`.
"""

import os
import sys

# Both are read when the libraries are imported.
if "--process-group" in sys.argv:
    # Triton's dot products round float32 to TF32 otherwise, 10 bits of 23.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
elif sys.argv[1:2] != ["async-tp"]:  # which captures what the compiler makes
    # Simulated ranks run eagerly. What a library compiles at import time would only import the compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"

from training.outcome import exit_now
from training.verify.main import main

if __name__ == "__main__":
    exit_now(main(sys.argv[1:]))  # Python's clean-up of these libraries takes a second
