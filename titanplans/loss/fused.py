"""The head and the cross entropy in one, a chunk of tokens at a time: the logits of one chunk exist, and no more.

    forward    logits of a chunk      1 product      tokens x hidden x vocabulary / ranks, as those below
               their losses           1 all-gather   2 numbers a token and rank (3 with label smoothing)
               hidden states'         1 product      a gradient, kept for the backward
               the weight's           1 product      a gradient, summed over the chunks in float32 or wider
    backward   times what comes in    -

Three products, as head and loss in sequence have, and a collective a chunk. With one collective for all chunks the logits
of each would be computed twice, before it and behind: a product more. The gradients are made in the forward, since
afterwards the logits are gone (Liger Kernel, arXiv 2410.10989, section 3.2, and flash-linear-attention do so on one GPU).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titanplans.errors import ParallelError
from titanplans.loss.shares import Objective, VocabularyShare, entropy_and_gradient

Elementwise = Callable[[torch.Tensor], torch.Tensor]
"""What a model does to its logits after its head: a soft cap, a scale."""
Compute = Callable[
    [torch.Tensor, torch.Tensor, VocabularyShare | None, Objective, bool], tuple[torch.Tensor, torch.Tensor]
]
"""`entropy_and_gradient`, or the same compiled."""


@dataclass(frozen=True)
class Settings:
    """How a loss is computed; its inputs come apart."""

    chunk: int
    """Tokens."""
    share: VocabularyShare | None
    """Which part of the vocabulary this rank holds; None for all of it."""
    objective: Objective
    after_head: Elementwise | None
    compute: Compute = entropy_and_gradient
    autocast: torch.dtype | None = None
    """In which the products are, where autocast says so."""


def fused_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """Return the summed loss, a scalar, float32 or wider.

    Its gradients are computed at once, those that something needs: none without a gradient.

    Args:
        hidden: [tokens, width], the same on all ranks; the gradient of each rank is its share's, to be summed over them.
        weight: [share of the vocabulary, width].
        bias: [share of the vocabulary].
        labels: [tokens], the next tokens; -100 where one does not count.
        settings: the rest.
    """
    recorded = torch.is_grad_enabled()
    return _Fused.apply(hidden, weight, bias, labels, settings, recorded)  # type: ignore[return-value]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        settings: Settings,
        recorded: bool,
    ) -> torch.Tensor:
        # `needs_input_grad` says what a tensor is, not whether gradients are wanted.
        needed = [recorded and needs for needs in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            sums = _Sums(hidden, weight, bias, settings, needed)
            for rows in _chunks(len(labels), settings.chunk):
                sums.add(rows, labels[rows])
            ctx.gradients = sums.gradients()
        return sums.loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        if torch.is_grad_enabled():
            raise ParallelError(
                "the gradient of a loss that the head computes chunk by chunk can't be differentiated again "
                "(create_graph = True): call the model without FusedLoss, with loss_parallel = False"
            )
        if ctx.gradients is None:
            raise ParallelError(
                "the gradients of a loss that the head computes chunk by chunk are freed after one backward "
                "(retain_graph = True): add the losses up before their backward, or call the model without FusedLoss"
            )
        # In place, and kept no longer: the head's is as large as the head.
        gradients, ctx.gradients = ctx.gradients, None
        return *(g if g is None else g.mul_(grad) for g in gradients), None, None, None


def _as_it_is(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _chunks(tokens: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` tokens, of one size but for the last."""
    size = -(tokens // -max(1, -(tokens // -most)))
    for start in range(0, tokens, size or 1):
        yield slice(start, min(start + size, tokens))


class _Sums:
    """The loss and the gradients of the chunks so far."""

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        settings: Settings,
        needed: Sequence[bool],
    ):
        dtype = settings.autocast or hidden.dtype
        self.settings, self.given = settings, (hidden, weight, bias)
        self.of_hidden, self.of_weight, self.of_bias = needed
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.wide = torch.promote_types(dtype, torch.float32)
        self.loss = hidden.new_zeros((), dtype=self.wide)
        self.hidden_gradient = torch.empty_like(self.hidden) if self.of_hidden else None
        self.weight_gradient: torch.Tensor | None = None
        self.bias_gradient: torch.Tensor | None = None

    def add(self, rows: slice, labels: torch.Tensor) -> None:
        """Add the loss of `rows` of the hidden states and its gradients."""
        hidden, settings = self.hidden[rows], self.settings
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        given, after = logits, settings.after_head
        if after is not None:
            # Hooks on saved tensors are for a later backward: a checkpoint's would compute the model again here.
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
                given = logits.requires_grad_()
                logits = after(given)
        # They are overwritten, but not where the gradient of what follows the head reads them.
        own = logits if after is None else logits.detach().clone()
        wanted = self.of_hidden or self.of_weight or self.of_bias
        loss, gradient = settings.compute(own, labels, settings.share, settings.objective, wanted)
        self.loss += loss
        if not wanted:
            return
        if after is not None:
            (gradient,) = torch.autograd.grad(logits, given, gradient)
        del logits, given, own
        if self.hidden_gradient is not None:
            torch.mm(gradient, self.weight, out=self.hidden_gradient[rows])
        if self.of_weight:
            self.weight_gradient = self._product(self.weight_gradient, gradient.t(), hidden)
        if self.of_bias:
            of_bias = gradient.sum(0, dtype=self.wide)
            self.bias_gradient = of_bias if self.bias_gradient is None else self.bias_gradient.add_(of_bias)

    def _product(self, so_far: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return a @ b, or `so_far` + a @ b, in float32 or wider."""
        if so_far is None:
            return (a @ b).to(self.wide)
        return so_far.addmm_(a, b) if so_far.dtype == a.dtype else so_far.add_(a @ b)

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return those of hidden states, weight and bias, in their dtypes; None where nothing needs one."""
        found = (self.hidden_gradient, self.weight_gradient, self.bias_gradient)
        needed = (self.of_hidden, self.of_weight, self.of_bias)
        return tuple(
            None if not wanted or x is None else (torch.zeros_like(x) if made is None else made.to(x.dtype))
            for made, x, wanted in zip(found, self.given, needed, strict=True)
        )
