"""`FusedLoss`: let the head of a model compute the loss in a forward, instead of logits.

    fused = FusedLoss(model)                      # once; the model may be split, sharded or neither
    with fused(labels):
        logits = model(tokens).logits             # a stand-in
    cross_entropy(logits, labels, tokens).backward()

Outside of the `with` the model returns logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.errors import ParallelError, either
from titanplans.loss.deferred_logits import Computed, DeferredLogits, NotFused, stand_in
from titanplans.loss.fused import Compute, Elementwise, Settings, fused_cross_entropy
from titanplans.loss.sharded_logits import (
    Objective,
    VocabularyShard,
    entropy_and_gradient,
    vocabulary_shard,
)
from titanplans.split.decoder import HEADS, find_head
from titanplans.split.module_weight import local_parameter
from titanplans.split.state import border_of_model, state_of
from titanplans.text import class_name
from titanplans.torch_private.autograd import version
from titanplans.torch_private.swapped import swapped

CHUNK = 512
"""Default number of tokens in a chunk; docs/benchmarks.md has the measurements."""


class FusedLoss:
    """The cross entropy of a model, computed in its head chunk by chunk.

    Args:
        model: a causal language model whose head is an `nn.Linear`; split, sharded or neither.
        chunk_tokens: number of tokens whose logits exist at once.
        compute: `entropy_and_gradient`, compiled or not.

    Raises:
        NotFused: the model has no head, or its head is not a plain `nn.Linear` (float8, adapters, a user's class).
        ParallelError: `chunk_tokens` is below 1.
    """

    def __init__(
        self, model: nn.Module, *, chunk_tokens: int = CHUNK, compute: Compute = entropy_and_gradient
    ):
        if (name := find_head(model)) is None:
            raise NotFused(
                f"{class_name(model)} has no head: its plan gives vocab_head() to no module, and no module is called "
                f"{either(HEADS)}"
            )
        if chunk_tokens < 1:
            raise ParallelError(f"chunk_tokens = {chunk_tokens}: use 1 or more")
        self.head, self.chunk_tokens, self.compute = model.get_submodule(name), chunk_tokens, compute
        self._model = class_name(model)
        _refuse_head(self.head, f"{self._model}.{name}")
        self._after_head = _elementwise(getattr(model, "config", None))
        self._border = border_of_model(model)
        self._shard: VocabularyShard | None = None

    @contextmanager
    def __call__(
        self, labels: torch.Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Iterator[None]:
        """Let the head compute the loss of `labels` in the one forward that the body of the `with` runs.

        `cross_entropy` has to get the same arguments afterwards.

        Args:
            labels: [...], the next token of each position; -100 for an ignored token. The same on all ranks that split the
                model.
            label_smoothing: as in `cross_entropy`.
            z_loss: as in `cross_entropy`.

        Raises:
            NotFused: the forward does not call the head once, with one hidden state for each label; or a library has set a
                `forward` on the head.
        """
        objective = Objective(label_smoothing, z_loss).checked()
        if "forward" in self.head.__dict__:
            raise NotFused(
                f"the head of {self._model} has a `forward` that a library or another FusedLoss has set on this "
                "module; the fused loss would skip it"
            )
        is_called = False

        def forward(input: torch.Tensor) -> DeferredLogits:
            nonlocal is_called
            if is_called:
                raise NotFused(f"{self._model} calls its head twice in one forward")
            is_called = True
            return self._loss(input, labels, objective)

        # Replace the head's forward, which runs inside the hooks: FSDP2 has gathered the weight, and the input is full on
        # all TP ranks.
        with swapped(self.head, "forward", forward):
            yield
        if not is_called:
            raise NotFused(f"the forward of {self._model} did not call its head")

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor, objective: Objective) -> DeferredLogits:
        all_labels = labels
        if self._border is not None and (tokens := self._border.tokens).ranks > 1:
            # If documents are packed into one sequence, labels are [B, L] and hidden states are [1, B * L, H].
            labels = tokens.take_local(labels.reshape(*hidden.shape[: tokens.dim], -1))
        if labels.numel() != hidden.shape[:-1].numel():
            raise NotFused(
                f"{labels.numel()} labels for hidden states of shape {tuple(hidden.shape)} at the head",
                "give one label for each position, the id of the next token, and no logits_to_keep",
            )
        head = self.head
        weight, bias = local_parameter(head, "weight"), local_parameter(head, "bias")
        assert weight is not None
        vocabulary = head._parameters["weight"].shape[0]  # type: ignore[union-attr]
        settings = Settings(
            self.chunk_tokens,
            self._vocabulary_shard(vocabulary, hidden.device),
            objective,
            self._after_head,
            self.compute,
            _autocast(hidden),
        )
        loss = fused_cross_entropy(hidden.flatten(0, -2), weight, bias, labels.reshape(-1), settings)
        computed = Computed(all_labels, version(all_labels), objective, self._after_head, loss.requires_grad)
        return stand_in(loss, (*hidden.shape[:-1], vocabulary), computed)

    def _vocabulary_shard(self, vocabulary: int, device: torch.device) -> VocabularyShard | None:
        parameter = self.head._parameters["weight"]
        mesh = None if self._border is None else self._border.mesh
        if mesh is None or not isinstance(parameter, DTensor) or not parameter.placements[-1].is_shard(0):
            return None
        if self._shard is None:
            self._shard = vocabulary_shard(vocabulary, mesh, device)
        return self._shard


def _refuse_head(head: nn.Module, name: str) -> None:
    """Raise NotFused for a head that does more than multiply by its weight."""
    if not isinstance(head, nn.Linear):
        raise NotFused(f"{name} is a {class_name(head)}, not an nn.Linear")
    forward_class = next(
        cls for cls in type(head).__mro__ if "forward" in vars(cls) and not _only_localizes(cls)
    )
    if forward_class is not nn.Linear or head._modules:
        raise NotFused(
            f"{name} is a {forward_class.__name__}, which does more than multiply by its weight (float8, adapters)"
        )
    if others := head._parameters.keys() - {"weight", "bias"}:
        raise NotFused(f"{name} has {' and '.join(sorted(others))} in addition to its weight (an adapter)")
    weight = head._parameters["weight"]
    if weight is None or not weight.is_floating_point():
        raise NotFused(f"{name} has a weight that is not floating point (quantized)")
    if isinstance(weight, DTensor) and state_of(head) is None and _is_tensor_parallel(weight):
        raise NotFused(
            f"{name} is split by a style that is not one of titanplans', so its weight is a DTensor in the forward"
        )


def _only_localizes(cls: Any) -> bool:
    """Whether a class only adds local parameters to its base class (`with_locals_in_forward`)."""
    return vars(cls)["forward"].__module__ == local_parameter.__module__


def _is_tensor_parallel(weight: DTensor) -> bool:
    return "tp" in (weight.device_mesh.mesh_dim_names or ())


def _autocast(hidden: torch.Tensor) -> torch.dtype | None:
    """Return autocast's dtype; None if autocast is off, or for float64, which autocast does not cast."""
    device_type = hidden.device.type
    is_cast = torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(device_type) if is_cast else None


def _elementwise(config: Any) -> Elementwise | None:
    """Return the function that a model with this config applies to its logits, or None."""
    # `DeferredLogits.check` compares it with the model's code at each forward, and refuses a model that does something else.
    for name, function in _FUNCTIONS.items():
        if (number := getattr(config, name, None)) is not None:
            return partial(function, number=number)
    return None


def _capped(logits: torch.Tensor, number: float) -> torch.Tensor:
    return torch.tanh(logits / number) * number


def _multiplied(logits: torch.Tensor, number: float) -> torch.Tensor:
    return logits * number


def _divided(logits: torch.Tensor, number: float) -> torch.Tensor:
    return logits / number


_FUNCTIONS = {
    "final_logit_softcapping": _capped,  # Gemma 2 and 3
    "logit_scale": _multiplied,  # Cohere
    "logits_scaling": _divided,  # Granite
}
