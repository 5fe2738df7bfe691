"""Check the `groups` of a depthwise convolution that is split by channels: a plan has to set it to the local count."""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.split.state import key_of

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_groups(module: nn.Module, style: ParallelStyle) -> None:
    """Let a convolution with groups raise PlanError if its input does not have the number of channels that `groups` implies.

    The check is made at the call, since a mixer's kernel may use the weight without calling the module, and then `groups`
    does not matter.
    """
    has_torch_forward = type(module).forward in [kind.forward for kind in _KINDS]
    if isinstance(module, _KINDS) and module.groups > 1 and has_torch_forward:
        module.register_forward_pre_hook(partial(_check, style, module.in_channels // module.groups))


def _check(style: ParallelStyle, channels_per_group: int, module: Any, args: Any) -> None:
    channels = args[0].shape[-1 - len(module.kernel_size)]
    if channels != channels_per_group * module.groups:
        key = key_of(module)
        name = f"{key.rpartition('.')[2]}.groups"
        raise PlanError(
            f"its groups = {module.groups} counts the channels of all ranks, but this rank's input has {channels} "
            f"channels: name '{name}' in local_attributes (mlp_attributes in an MLP), as self.divide_by_degree(attn, "
            f"'{name}') does",
            key=key,
            style=style,
            module=module,
        )
