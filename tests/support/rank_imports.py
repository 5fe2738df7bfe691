"""Import the modules that ranks need, before ranks are forked (see process_groups.py).

Importing them builds no model and starts no thread.
"""

import gc
import importlib
import warnings

from titanplans.training.trainer.device import no_trainer

MODULES = [
    "fla.models",
    "hypothesis",
    "pytest",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchao.float8",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("gemma3", "llama", "mistral", "qwen2", "qwen3")
    ),
    *(f"titanplans.{name}" for name in ("modeling", "observe", "parallel", "proof")),
]

if no_trainer() is None:
    MODULES.append("titanplans.training.trainer.trainer")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings would be printed once per worker, into pytest's output
    for name in MODULES:
        importlib.import_module(name)
gc.freeze()  # a collection would write to memory pages that forked ranks share
gc.set_threshold(50_000)  # compiling creates many objects, most of which live on
