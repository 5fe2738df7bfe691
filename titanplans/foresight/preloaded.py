"""What rehearsals import. A server imports this module once, and the processes of `rehearsing` are forked from it."""

from importlib import import_module

from titanplans.extras import is_installed
from titanplans.quiet import silence

silence(training=True)
for _module in (
    "titanplans.foresight.forecast",
    "titanplans.training.job.checks",
    "titanplans.training.trainer.device",
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.debug",
    *(("titanplans.kernels.install", "titanplans.kernels.interpreted.fla") if is_installed("fla") else ()),
):
    import_module(_module)
