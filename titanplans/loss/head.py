"""`FusedLoss`: for a forward, let the head of a model compute the loss instead of logits.

    fused = FusedLoss(model)                      # once, of a model that is split, sharded or neither
    with fused(labels):
        logits = model(tokens).logits             # a stand-in
    cross_entropy(logits, labels, tokens).backward()

In the head's own forward, where FSDP2 has gathered its weight and where its input is whole on all ranks of tensor
parallelism. Outside of the `with` the model is as it was: it gives logits.
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
from titanplans.loss.shares import (
    Objective,
    VocabularyShare,
    entropy_and_gradient,
    share_of,
)
from titanplans.split.decoder import HEADS, find_head
from titanplans.split.module_weight import local_parameter
from titanplans.split.state import border_of_model, state_of
from titanplans.text import class_name
from titanplans.torch_private.autograd import version
from titanplans.torch_private.swapped import swapped

CHUNK = 512
"""Tokens of a chunk by default; docs/benchmarks.md has the figures."""


class FusedLoss:
    """The cross entropy of a model, computed in its head chunk by chunk.

    Args:
        model: a causal language model with a head, an `nn.Linear`.
        chunk_tokens: tokens whose logits exist at once, on a rank's share of the vocabulary.
        compute: `entropy_and_gradient`, or the same compiled.

    Raises:
        NotFused: it has no head, or one that is no plain `nn.Linear`: in float8, with adapters, of a class of its own.
        ParallelError: `chunk_tokens` is below 1.
    """

    def __init__(
        self, model: nn.Module, *, chunk_tokens: int = CHUNK, compute: Compute = entropy_and_gradient
    ):
        if (name := find_head(model)) is None:
            raise NotFused(
                f"{class_name(model)} has no head: its plan gives none vocab_head(), and none is called {either(HEADS)}"
            )
        if chunk_tokens < 1:
            raise ParallelError(f"chunk_tokens = {chunk_tokens}: at least 1")
        self.head, self.chunk_tokens, self.compute = model.get_submodule(name), chunk_tokens, compute
        self._model = class_name(model)
        _refuse_head(self.head, f"{self._model}.{name}")
        self._after_head = _elementwise(getattr(model, "config", None))
        self._border = border_of_model(model)
        self._share: VocabularyShare | None = None

    @contextmanager
    def __call__(
        self, labels: torch.Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Iterator[None]:
        """Let the one forward of the body have the loss of `labels` computed by its head.

        Args:
            labels: [...], as many as tokens: the next ones; -100 where one does not count. The same on all ranks that
                split the model. `cross_entropy` is given the same, and the same numbers below.
            label_smoothing, z_loss: as for `cross_entropy`.

        Raises:
            NotFused: the forward does not call the head, or not with one token for each label; or the head has a `forward`
                of its own, set on this module.
        """
        objective = Objective(label_smoothing, z_loss).checked()
        if "forward" in self.head.__dict__:
            raise NotFused(
                f"the head of {self._model} has a forward that was set on this module, by a library or by another "
                f"FusedLoss, which would not be called"
            )
        called = False

        def forward(input: torch.Tensor) -> DeferredLogits:
            nonlocal called
            if called:
                raise NotFused(f"{self._model} calls its head twice in one forward")
            called = True
            return self._loss(input, labels, objective)

        with swapped(self.head, "forward", forward):
            yield
        if not called:
            raise NotFused(f"the forward of {self._model} did not call its head")

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor, objective: Objective) -> DeferredLogits:
        given = labels
        if self._border is not None and (tokens := self._border.tokens).ranks > 1:
            # Of sequences packed into one row hidden states are [1, B * L, H].
            labels = tokens.take_local(labels.reshape(*hidden.shape[: tokens.dim], -1))
        if labels.numel() != hidden.shape[:-1].numel():
            raise NotFused(
                f"{labels.numel()} labels for hidden states of shape {tuple(hidden.shape)} at the head",
                "give one label for each position, the next token's, and no logits_to_keep",
            )
        head = self.head
        weight, bias = local_parameter(head, "weight"), local_parameter(head, "bias")
        assert weight is not None
        vocabulary = head._parameters["weight"].shape[0]  # type: ignore[union-attr]
        settings = Settings(
            self.chunk_tokens,
            self._share_of(vocabulary, weight, hidden.device),
            objective,
            self._after_head,
            self.compute,
            _autocast(hidden),
        )
        loss = fused_cross_entropy(hidden.flatten(0, -2), weight, bias, labels.reshape(-1), settings)
        computed = Computed(given, version(given), objective, self._after_head, loss.requires_grad)
        return stand_in(loss, (*hidden.shape[:-1], vocabulary), computed)

    def _share_of(
        self, vocabulary: int, weight: torch.Tensor, device: torch.device
    ) -> VocabularyShare | None:
        parameter = self.head._parameters["weight"]
        mesh = None if self._border is None else self._border.mesh
        if mesh is None or not isinstance(parameter, DTensor) or not parameter.placements[-1].is_shard(0):
            return None
        if self._share is None:
            self._share = share_of(vocabulary, mesh, device)
        return self._share


def _refuse_head(head: nn.Module, name: str) -> None:
    """Refuse a head that is more than a product with its weight.

    Raises:
        NotFused: names its class.
    """
    if not isinstance(head, nn.Linear):
        raise NotFused(f"{name} is a {class_name(head)}, and no nn.Linear")
    own = next(cls for cls in type(head).__mro__ if "forward" in vars(cls) and not _only_localizes(cls))
    if own is not nn.Linear or head._modules:
        raise NotFused(
            f"{name} is a {own.__name__}, which does more than multiply by its weight (float8, adapters)"
        )
    if more := head._parameters.keys() - {"weight", "bias"}:
        raise NotFused(f"{name} has {' and '.join(sorted(more))} in addition to its weight (an adapter)")
    weight = head._parameters["weight"]
    if weight is None or not weight.is_floating_point():
        raise NotFused(f"{name} keeps its weight in another form than numbers")
    if isinstance(weight, DTensor) and state_of(head) is None and _splits(weight):
        raise NotFused(
            f"{name} is split by a style that is not a plan's own, which reads its weight as a DTensor"
        )


def _only_localizes(cls: Any) -> bool:
    """Whether a class only gives local parameters to the forward of the class it extends (`with_locals_in_forward`)."""
    return vars(cls)["forward"].__module__ == local_parameter.__module__


def _splits(weight: DTensor) -> bool:
    return "tp" in (weight.device_mesh.mesh_dim_names or ())


def _autocast(hidden: torch.Tensor) -> torch.dtype | None:
    """Return the dtype that autocast computes in; None where it is off, and for float64, which it leaves as it is."""
    kind = hidden.device.type
    computes = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if computes else None


def _elementwise(config: Any) -> Elementwise | None:
    """Return the function that a model with this config applies to its logits; None: none.

    `DeferredLogits.check` compares it with the model's code at each forward, and refuses a model that does something else.
    """
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
