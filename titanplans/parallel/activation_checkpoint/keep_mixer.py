"""`Kept`: the wrapper of a token mixer that is not recomputed with its block, whichever kernels the mixer calls.

Unlike the functions of `operators`, `Kept` also works for Triton kernels and autograd.Functions, but not in compiled
blocks.
"""

import threading
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import get_device_states, set_device_states

from titanplans.errors import ParallelError
from titanplans.text import class_name
from titanplans.torch_private.autograd import version
from titanplans.torch_private.dispatch import tree_leaves, tree_map_only
from titanplans.torch_private.modules import ActivationWrapper, checkpointed


class _Call:
    """The outputs of the `Kept` modules of one checkpointed call, in the order in which they ran."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Any, list[int], Any]] = []
        """For each module: the output, the versions of its tensors, and the random state after the module."""
        self.next = 0


class _Running(threading.local):
    """The checkpointed calls that run on this thread, innermost last. A forward, or a recomputation, runs on one thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[_Call, bool]] = []
        """Each call, and whether it is a recomputation."""


_running = _Running()


def keep_modules() -> tuple["_Run", "_Run"]:
    """Return the contexts for forward and recomputation: a `context_fn` of `torch.utils.checkpoint` for `Kept` modules."""
    call = _Call()
    return _Run(call, recomputes=False), _Run(call, recomputes=True)


class _Run(AbstractContextManager[None]):
    """The context of a call's forward, or of its recomputation. With `retain_graph` a call is recomputed several times."""

    def __init__(self, call: _Call, recomputes: bool):
        self.call, self.recomputes = call, recomputes

    def __enter__(self) -> None:
        self.call.next = 0
        _running.calls.append((self.call, self.recomputes))

    def __exit__(self, *exception: Any) -> None:
        _running.calls.pop()


class Kept(ActivationWrapper):
    """Run a module only in the forward, and return the forward's output in the recomputation of the block around it.

    Args:
        module: the module; names in state dicts do not change.
        preserve_rng_state: in the recomputation, set the random generators to their state after the module's forward, so
            that later dropout drops the same elements.
    """

    def __init__(self, module: nn.Module, preserve_rng_state: bool):
        super().__init__(module)
        self.preserve_rng_state = preserve_rng_state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in a recomputation return the output of the forward."""
        call, recomputes = _running.calls[-1] if _running.calls else (None, False)
        if call is None:
            return checkpointed(self)(*args, **kwargs)
        if recomputes:
            output, versions, state = call.outputs[call.next]
            call.next += 1
            if _versions(output) != versions:
                raise ParallelError(
                    f"the output of {class_name(checkpointed(self))} was changed in place after the "
                    "forward kept it: recompute the mixer too (mode full), or change a clone"
                )
            _set_random_state(state)
            return output
        # The checkpoint's hooks would drop every tensor that the module saves for its backward; these hooks replace them.
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            output = checkpointed(self)(*args, **kwargs)
        state = _random_state(args, kwargs) if self.preserve_rng_state else None
        kept = tree_map_only(torch.Tensor, _detached, output)
        call.outputs.append((kept, _versions(kept), state))
        return output


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _versions(output: Any) -> list[int]:
    return [version(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _random_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.get_rng_state(), *get_device_states(*args, *kwargs.values())


def _set_random_state(state: Any) -> None:
    if state is not None:
        cpu, devices, states = state
        torch.set_rng_state(cpu)
        set_device_states(devices, states)
