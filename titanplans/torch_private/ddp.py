"""DDP as torch's composable `replicate`."""

from torch.distributed._composable.replicate import DDP, replicate
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "DDP",
    "has_static_graph",
    "hide_ddp_from_compiler",
    "replicate",
    "start_ddp",
]


def has_static_graph(model: DDP) -> bool:
    """Whether `model` was replicated with a static graph."""
    return replicate.state(model)._ddp.static_graph  # pyrefly: ignore[missing-attribute, bad-argument-type]


def start_ddp(model: DDP) -> None:
    """Build the reducer of `replicate` now, instead of in the first forward."""
    replicate.state(model).lazy_init()  # pyrefly: ignore[missing-attribute, bad-argument-type]


def hide_ddp_from_compiler(*_: object) -> None:
    """Prevent Dynamo from splitting graphs at DDP's buckets. A forward hook or pre-hook."""
    DistributedDataParallel._active_ddp_module = None
