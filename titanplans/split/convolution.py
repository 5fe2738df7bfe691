"""A depthwise convolution that is split by its channels counts them in `groups`, which a plan has to set for its rank.

Whether its own forward runs can't be known before: a mixer's kernel may read its weight instead, and then nothing counts.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.split.state import key_of

_KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def check_groups(module: nn.Module, style: ParallelStyle) -> None:
    """Let `module` refuse a call in which it counts the channels of all ranks, if it is a convolution in groups.

    A later call raises PlanError, with the attribute to name.
    """
    own_forward = type(module).forward in [kind.forward for kind in _KINDS]
    if isinstance(module, _KINDS) and module.groups > 1 and own_forward:
        module.register_forward_pre_hook(partial(_check, style, module.in_channels // module.groups))


def _check(style: ParallelStyle, inputs: int, module: Any, args: Any) -> None:
    """Raise if the channels that come are not those of the groups; `inputs` are the channels of each."""
    channels = args[0].shape[-1 - len(module.kernel_size)]
    if channels != inputs * module.groups:
        key = key_of(module)
        name = f"{key.rpartition('.')[2]}.groups"
        raise PlanError(
            f"its groups = {module.groups} are those of all ranks, and this rank gives it {channels} channels: name "
            f"'{name}' in local_attributes (in mlp_attributes if an MLP holds it), as self.divided(attn, '{name}') does",
            key=key,
            style=style,
            module=module,
        )
