"""All-gather of FSDP2 in float8, with a quarter of the bytes of float32 and half the bytes of bfloat16.

torchao wraps each converted weight in a tensor subclass, which FSDP2 casts to float8 before its all-gather. The scale of
the full weight is computed before the forward (`scales`), or in each gather by a reduction over the ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titanplans.split.parameters.shards import as_shard_of
from titanplans.torch_private.dtensor import local_tensor
from titanplans.torch_private.fsdp import DefaultAllGather
from titanplans.torch_private.modules import add_state_dict_hook
from titanplans.torch_private.torchao import is_float8_gathered, stored_weight


def gather_in_float8(model: nn.Module) -> None:
    """Make every FSDP module of `model` gather in float8. The state dict holds plain tensors in high precision.

    Args:
        model: converted with `enable_fsdp_float8_all_gather`, then sharded by `fsdp.shard`.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_ByteAllGather())
    add_state_dict_hook(model, _unwrap)


def _unwrap(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, tensor in state.items():
        if is_float8_gathered(tensor):
            state[name] = as_shard_of(tensor, stored_weight(local_tensor(tensor)))


class _ByteAllGather(DefaultAllGather):
    """All-gather of float8 tensors as bytes, since gloo does not support float8."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        out, shard = (t.view(torch.uint8) if t.itemsize == 1 else t for t in (output_tensor, input_tensor))
        return super().__call__(out, shard, group, async_op)
