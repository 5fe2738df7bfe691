"""nn.Module: activation checkpointing, compilation in place, hooks."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper

__all__ = [
    "CHECKPOINTED",
    "COMPILED_CALL",
    "ActivationWrapper",
    "add_state_dict_hook",
    "checkpoint_wrapper",
    "checkpointed",
    "compiled_call",
    "hooks_of",
    "plain_call",
    "set_compiled_call",
]


CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name of the wrapped module in an ActivationWrapper."""


def checkpointed(wrapper: nn.Module) -> nn.Module:
    """Return the wrapped module of an ActivationWrapper."""
    return getattr(wrapper, CHECKPOINTED)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module with the function that a call of the module runs instead of the hooks and the forward."""


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled function that runs when `module` is called; None if it is not compiled in place."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Make calls of `module` run `call`, as `module.compile()` does with the result of torch.compile."""
    module._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return the function that an uncompiled call of `module` runs: its hooks and its forward."""
    return module._call_impl


def add_state_dict_hook(module: nn.Module, hook: Callable[..., None]) -> None:
    """Call `hook(module, state, prefix, metadata)` on each state dict of `module` before it is returned."""
    module._register_state_dict_hook(hook)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward and backward hooks of `module`."""
    return [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]
