"""Every module's output and that output's gradient, recorded by hooks in the order of the run."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanplans.loss import DeferredLogits
from titanplans.split.converted import is_cast


class Recorder:
    """A context that records the outputs of a model's modules, and their gradients, in a step that runs inside.

    `tensors` has "name" for a module's output and "name'" for the gradient of that output, detached;
    a module that runs again has a number after its name. `order` lists the names as they finished. With several
    `sequences`, an output [tokens, hidden], such as a router's, is unflattened by sequence, since a rank may hold a shard of
    each.
    """

    def __init__(self, model: nn.Module, sequences: int = 1):
        self._sequences = sequences
        self.tensors: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.running: list[str] = []
        """Modules whose forward has begun and not ended: after an exception, the last has raised it."""
        self.model = model
        self._times: Counter[str] = Counter()
        self._handles: list[Any] = []

    def __enter__(self) -> "Recorder":
        for name, module in self.model.named_modules():
            # Before the plan's own hooks at a module's entry, and after those at its exit.
            self._handles.append(
                module.register_forward_pre_hook(
                    lambda *_, name=name: self.running.append(name), prepend=True
                )
            )
            self._handles.append(
                module.register_forward_hook(lambda _m, _a, out, name=name: self._finished(name, out))
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Record no more forwards; gradients still come."""
        for handle in self._handles:
            handle.remove()

    @property
    def place(self) -> str:
        """Where the newest step stopped, in words."""
        if self.running:
            last = self.running[-1]
            inside = bool(self.order) and (not last or self.order[-1].startswith(f"{last}."))
            after = f" after {self.order[-1]}" if inside else ""
            return f"in {last or 'the model'}{after}"
        came_back = [key for key in self.order if gradient_key(key) in self.tensors]
        return f"in the backward of {came_back[0]}" if came_back else "in the loss"

    def _finished(self, name: str, output: Any) -> None:
        self.running.pop()
        tensor = _first_tensor(output)
        if not name or tensor is None or isinstance(tensor, DeferredLogits) or not tensor.is_floating_point():
            return
        tensor = getattr(tensor, "shard", tensor)  # of a ShardedSequence, this rank's tokens
        self._times[name] += 1
        key = name if self._times[name] == 1 else f"{name} (run {self._times[name]})"
        self.order.append(key)
        self.tensors[key] = self._by_sequence(tensor.detach())
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self._came_back(key, grad))

    def _came_back(self, key: str, grad: torch.Tensor) -> None:
        # A float8 gradient was cast on its way; the whole model's is cast later.
        if not is_cast(grad):
            self.tensors[gradient_key(key)] = self._by_sequence(grad.detach())

    def _by_sequence(self, x: torch.Tensor) -> torch.Tensor:
        flat = self._sequences > 1 and x.ndim == 2 and not len(x) % self._sequences
        return x.unflatten(0, (self._sequences, -1)) if flat else x


def gradient_key(key: str) -> str:
    """Return the key of the gradient of the output that `key` names."""
    return f"{key}'"


def module_name(key: str) -> str:
    """Return the module's name behind a key of a Recorder."""
    return key.rstrip("'").partition(" ")[0]


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return next((t for t in map(_first_tensor, output.values()) if t is not None), None)
    if isinstance(output, tuple | list):
        return next((t for t in map(_first_tensor, output) if t is not None), None)
    return None
