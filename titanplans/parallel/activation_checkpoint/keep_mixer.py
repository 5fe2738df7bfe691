"""A module inside of a recomputed block that is kept, whatever kernels it is made of: the block's token mixer.

It runs once; the recomputation around it gets the output that the forward kept. Works where operators can't be told
apart (Triton kernels, autograd.Functions), but not in a compiled block. A kept output belongs to one checkpointed call,
whose forward runs on one thread and whose recomputation on one thread, too.
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
    """What one checkpointed call keeps of its `Kept` modules, in the order in which they ran."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Any, list[int], Any]] = []
        self.next = 0


class _Running(threading.local):
    """The call that runs on this thread, and whether it recomputes; the innermost one last."""

    def __init__(self) -> None:
        self.calls: list[tuple[_Call, bool]] = []


_running = _Running()


def keep_modules() -> tuple["_Run", "_Run"]:
    """A `context_fn` for `torch.utils.checkpoint`: the `Kept` modules within are not recomputed."""
    call = _Call()
    return _Run(call, recomputes=False), _Run(call, recomputes=True)


class _Run(AbstractContextManager[None]):
    """One run of a call's function; the recomputation's may be entered again, when a graph is retained."""

    def __init__(self, call: _Call, recomputes: bool):
        self.call, self.recomputes = call, recomputes

    def __enter__(self) -> None:
        self.call.next = 0
        _running.calls.append((self.call, self.recomputes))

    def __exit__(self, *exception: Any) -> None:
        _running.calls.pop()


class Kept(ActivationWrapper):
    """A module that runs once, in the forward: its activations are kept, although those around it are not.

    In the recomputation it returns the output of the forward, and leaves the random generators as it
    left them then, so that dropout after it drops the same.

    Args:
        module: the module; names in state dicts stay its own.
        preserve_rng_state: whether to bring back the generators' state.
    """

    def __init__(self, module: nn.Module, preserve_rng_state: bool):
        super().__init__(module)
        self.preserve_rng_state = preserve_rng_state

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or return its output of the forward."""
        call, recomputes = _running.calls[-1] if _running.calls else (None, False)
        if call is None:
            return checkpointed(self)(*args, **kwargs)
        if recomputes:
            output, versions, state = call.outputs[call.next]
            call.next += 1
            if _versions(output) != versions:
                raise ParallelError(
                    f"the output of {class_name(checkpointed(self))} was changed in place after the "
                    "forward kept it: recompute the mixer too (mode full), or change a copy"
                )
            _set_random_state(state)
            return output
        # The checkpoint's hooks would note every tensor saved here and drop it; these hooks hide them from it.
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
