"""`Recorder`: every module's output and the gradient of that output, recorded by hooks."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from titanplans.loss import DeferredLogits
from titanplans.split.converted import is_cast


class Recorder:
    """Context manager that records the output of each module in a forward, and the outputs' gradients, even after its
    exit.

    Args:
        model: unsplit or split.
        sequences: number of sequences in the batch. If there are several, an output [tokens, hidden], such as a router's,
            is recorded as [sequences, tokens of each, hidden], since a rank may hold a shard of each sequence.

    Attributes:
        tensors: the recorded tensors, detached, by key. The key of a module's output is its name, "name"; the key of the
            output's gradient is "name'". If a module runs again, its key is "name (run 2)".
        order: keys of the outputs in the order in which the modules finished.
        running: modules whose forward has begun and not ended. If an exception ended the forward, the last of these
            modules raised it.
    """

    def __init__(self, model: nn.Module, sequences: int = 1):
        self._sequences = sequences
        self.tensors: dict[str, torch.Tensor] = {}
        self.order: list[str] = []
        self.running: list[str] = []
        self.model = model
        self._runs: Counter[str] = Counter()
        self._handles: list[Any] = []

    def __enter__(self) -> "Recorder":
        for name, module in self.model.named_modules():
            # On a module's inputs these hooks run before the plan's hooks, and on its output after the plan's hooks.
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
        """Stop recording forwards. A later backward of recorded outputs is still recorded."""
        for handle in self._handles:
            handle.remove()

    @property
    def place(self) -> str:
        """Where the recorded forward or its backward stopped, in words."""
        if self.running:
            innermost = self.running[-1]
            has_progress = bool(self.order) and (not innermost or self.order[-1].startswith(f"{innermost}."))
            after = f" after {self.order[-1]}" if has_progress else ""
            return f"in {innermost or 'the model'}{after}"
        with_gradient = [key for key in self.order if gradient_key(key) in self.tensors]
        return f"in the backward of {with_gradient[0]}" if with_gradient else "in the loss"

    def _finished(self, name: str, output: Any) -> None:
        self.running.pop()
        tensor = _first_tensor(output)
        if not name or tensor is None or isinstance(tensor, DeferredLogits) or not tensor.is_floating_point():
            return
        tensor = getattr(tensor, "shard", tensor)  # a ShardedSequence is recorded by its local tokens
        self._runs[name] += 1
        key = name if self._runs[name] == 1 else f"{name} (run {self._runs[name]})"
        self.order.append(key)
        self.tensors[key] = self._by_sequence(tensor.detach())
        if tensor.requires_grad:
            tensor.register_hook(lambda grad: self._record_gradient(key, grad))

    def _record_gradient(self, key: str, grad: torch.Tensor) -> None:
        # A split model casts some gradients to float8 before this point, and the unsplit model after it.
        if not is_cast(grad):
            self.tensors[gradient_key(key)] = self._by_sequence(grad.detach())

    def _by_sequence(self, x: torch.Tensor) -> torch.Tensor:
        is_flat = self._sequences > 1 and x.ndim == 2 and not len(x) % self._sequences
        return x.unflatten(0, (self._sequences, -1)) if is_flat else x


def gradient_key(key: str) -> str:
    """Return the key of the gradient of the output with `key`."""
    return f"{key}'"


def module_name(key: str) -> str:
    """Return the name of the module whose output, or whose output's gradient, has `key`."""
    return key.rstrip("'").partition(" ")[0]


def _first_tensor(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, Mapping):
        return next((t for t in map(_first_tensor, output.values()) if t is not None), None)
    if isinstance(output, tuple | list):
        return next((t for t in map(_first_tensor, output) if t is not None), None)
    return None
