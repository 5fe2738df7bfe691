"""FSDP2: the internal state of a sharded module."""

from typing import Any

from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

__all__ = [
    "DefaultAllGather",
    "drop_gradients",
    "fsdp_group",
    "mixed_precision",
    "settle_fsdp_root",
    "unreduced_gradients",
]


def fsdp_group(module: FSDPModule) -> Any:
    """Return the FSDPParamGroup of `module`; None if it manages no parameters."""
    return module._get_fsdp_state()._fsdp_param_group


def mixed_precision(group: Any) -> Any:
    """Return the MixedPrecisionPolicy of an FSDPParamGroup; from torch 2.15 on, the policy of its first parameter."""
    return group.mp_policy if hasattr(group, "mp_policy") else group.fsdp_params[0].mp_policy


def unreduced_gradients(group: Any) -> list[tuple[Any, str]]:
    """Return where an FSDPParamGroup holds the gradients of its next reduction, as pairs of an object and an attribute."""
    holders = []
    for param in group.fsdp_params:
        # Before torch 2.15, gradients of several backwards are accumulated outside of `.grad`.
        accumulate = getattr(param, "accumulate_unsharded_grad_if_needed", None)
        if accumulate is not None:
            accumulate()
        unsharded = getattr(param, "_unsharded_param", None)  # it does not exist before the first all-gather
        if accumulate is not None and param.unsharded_accumulated_grad is not None:
            holders.append((param, "unsharded_accumulated_grad"))
        elif unsharded is not None and unsharded.grad is not None:
            holders.append((unsharded, "grad"))
    return holders


def drop_gradients(group: Any) -> None:
    """Drop the gradients that an FSDPParamGroup holds until the reduction of a later micro batch."""
    group._partial_reduce_output = None
    for owner, name in unreduced_gradients(group):
        setattr(owner, name, None)


def settle_fsdp_root(module: FSDPModule) -> bool:
    """Make FSDP2 initialize the states of the FSDP modules in `module`; return whether `module` is their root.

    FSDP2 does this in the first forward, whose module becomes the root.
    """
    state = module._get_fsdp_state()
    state._lazy_init()  # does nothing if it was called before
    return bool(state._is_root)
