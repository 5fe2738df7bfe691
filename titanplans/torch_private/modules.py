"""nn.Module: recomputed (activation checkpointing), compiled in place, its hooks."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, checkpoint_wrapper

__all__ = [
    "CHECKPOINTED",
    "COMPILED_CALL",
    "ActivationWrapper",
    "checkpoint_wrapper",
    "checkpointed",
    "compiled_call",
    "hooks_of",
    "on_state_dict",
    "plain_call",
    "set_compiled_call",
]


CHECKPOINTED = "_checkpoint_wrapped_module"
"""The name under which an ActivationWrapper holds its module."""


def checkpointed(wrapper: nn.Module) -> nn.Module:
    """Return the module inside of an ActivationWrapper."""
    return getattr(wrapper, CHECKPOINTED)


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that runs in place of its hooks and its forward when it is called."""


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Return the compiled function that runs when `module` is called; None if it is not compiled in place."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `call` run when `module` is called, as `module.compile()` does with what torch.compile returns."""
    module._compiled_call_impl = call


def plain_call(module: nn.Module) -> Callable[..., Any]:
    """Return what runs when `module` is called and not compiled: its hooks and its forward."""
    return module._call_impl


def on_state_dict(module: nn.Module, hook: Callable[..., None]) -> None:
    """Let `hook(module, state, prefix, metadata)` change each state dict of `module` before it is returned."""
    module._register_state_dict_hook(hook)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the forward and backward hooks of `module`."""
    return [
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
    ]
