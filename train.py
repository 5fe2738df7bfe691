"""Train a language model from a TOML job; the same as `titanplans train`.

    python train.py configs/gla_debug.toml                              # CPU or GPUs of this machine
    python train.py configs/gla_debug.toml --training.steps 50          # the command line overrides
    torchrun --nnodes 2 --nproc-per-node 8 … train.py configs/x.toml   # several machines

`--print-config` prints the job as it would run, `--help` every key.
"""

import sys

from titanplans.cli.main import run

if __name__ == "__main__":
    run(["train", *sys.argv[1:]])
