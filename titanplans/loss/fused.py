"""`fused_cross_entropy`: head and cross entropy in chunks of tokens, so that the logits of only one chunk exist at once.

    forward, per chunk   logits                       matrix product
                         losses                       all-gather of 2 numbers per token (3 with label smoothing)
                         gradient of hidden states    matrix product, kept for the backward
                         gradient of the weight       matrix product, summed over the chunks in float32 or wider
    backward             gradients x incoming gradient

Each product is of size tokens x hidden x vocabulary / ranks. There are three, as without chunks, and one collective per
chunk. With one collective for all chunks, the logits would be computed twice, before and after the collective: a fourth
product. Gradients are computed in the forward, since afterwards the logits are freed (as in Liger Kernel, arXiv
2410.10989, section 3.2, and flash-linear-attention, on one GPU).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from titanplans.errors import ParallelError
from titanplans.loss.sharded_logits import Objective, VocabularyShard, entropy_and_gradient

Elementwise = Callable[[torch.Tensor], torch.Tensor]
"""A function that a model applies to its logits after the head: a soft cap, a scale."""
Compute = Callable[
    [torch.Tensor, torch.Tensor, VocabularyShard | None, Objective, bool], tuple[torch.Tensor, torch.Tensor]
]
"""`entropy_and_gradient`, compiled or not."""


@dataclass(frozen=True)
class Settings:
    """Settings of `fused_cross_entropy`."""

    chunk: int
    """The largest number of tokens in a chunk."""
    shard: VocabularyShard | None
    """This rank's shard of the vocabulary; None: the weight has the full vocabulary."""
    objective: Objective
    after_head: Elementwise | None
    compute: Compute = entropy_and_gradient
    autocast: torch.dtype | None = None
    """Autocast's dtype, in which the products are computed; None: in the dtype of the hidden states."""


def fused_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    settings: Settings,
) -> torch.Tensor:
    """Return the summed loss, a scalar, float32 or wider. The gradients that are needed are computed here, too.

    Args:
        hidden: [tokens, width], the same on all ranks. Its gradient is partial, to be summed over the ranks.
        weight: [shard of the vocabulary, width].
        bias: [shard of the vocabulary].
        labels: [tokens], the next tokens; -100 for an ignored token.
        settings: the settings of the loss.
    """
    return _Fused.apply(hidden, weight, bias, labels, settings, torch.is_grad_enabled())  # type: ignore[return-value]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        settings: Settings,
        grad_enabled: bool,
    ) -> torch.Tensor:
        # `needs_input_grad` is True for a parameter even if gradients are off.
        needed = [grad_enabled and needs for needs in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            sums = ChunkSums(hidden, weight, bias, settings, needed)
            for chunk in _chunks(len(labels), settings.chunk):
                sums.add(chunk, labels[chunk])
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
        # Scale in place, and free at once, since the weight's gradient is as large as the head.
        gradients, ctx.gradients = ctx.gradients, None
        return *(g if g is None else g.mul_(grad) for g in gradients), None, None, None


def _unchanged(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _chunks(tokens: int, most: int) -> Iterator[slice]:
    """Yield slices of at most `most` tokens, all of the same size except the last."""
    size = -(tokens // -max(1, -(tokens // -most)))
    for start in range(0, tokens, size or 1):
        yield slice(start, min(start + size, tokens))


class ChunkSums:
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
        self.settings, self.inputs = settings, (hidden, weight, bias)
        self.needs_hidden, self.needs_weight, self.needs_bias = needed
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self.bias = None if bias is None else bias.to(dtype)
        self.sum_dtype = torch.promote_types(dtype, torch.float32)
        self.loss = hidden.new_zeros((), dtype=self.sum_dtype)
        self.hidden_gradient = torch.empty_like(self.hidden) if self.needs_hidden else None
        self.weight_gradient: torch.Tensor | None = None
        self.bias_gradient: torch.Tensor | None = None

    def add(self, chunk: slice, labels: torch.Tensor) -> None:
        """Add the loss of a chunk of the tokens, and its gradients."""
        hidden, settings = self.hidden[chunk], self.settings
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        head_output, after_head = logits, settings.after_head
        if after_head is not None:
            # Switch off the user's hooks on saved tensors. They are meant for a later backward; in this one, the hook of a
            # checkpoint would recompute the model.
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged):
                head_output = logits.requires_grad_()
                logits = after_head(head_output)
        # `compute` overwrites its logits, which the backward of `after_head` may still need.
        writable = logits if after_head is None else logits.detach().clone()
        needs_gradient = self.needs_hidden or self.needs_weight or self.needs_bias
        loss, gradient = settings.compute(
            writable, labels, settings.shard, settings.objective, needs_gradient
        )
        self.loss += loss
        if not needs_gradient:
            return
        if after_head is not None:
            (gradient,) = torch.autograd.grad(logits, head_output, gradient)
        del logits, head_output, writable  # free the logits before the products
        if self.hidden_gradient is not None:
            torch.mm(gradient, self.weight, out=self.hidden_gradient[chunk])
        if self.needs_weight:
            self.weight_gradient = self._product(self.weight_gradient, gradient.t(), hidden)
        if self.needs_bias:
            of_chunk = gradient.sum(0, dtype=self.sum_dtype)
            self.bias_gradient = of_chunk if self.bias_gradient is None else self.bias_gradient.add_(of_chunk)

    def _product(self, total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return `total` + a @ b in float32 or wider; a `total` of None counts as 0."""
        if total is None:
            return (a @ b).to(self.sum_dtype)
        return total.addmm_(a, b) if total.dtype == a.dtype else total.add_(a @ b)

    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias in their dtypes; None for a gradient that is not
        needed."""
        gradients = (self.hidden_gradient, self.weight_gradient, self.bias_gradient)
        needed = (self.needs_hidden, self.needs_weight, self.needs_bias)
        # Without tokens there are no chunks, and the gradients are 0.
        return tuple(
            None
            if not is_needed or x is None
            else (torch.zeros_like(x) if grad is None else grad.to(x.dtype))
            for grad, x, is_needed in zip(gradients, self.inputs, needed, strict=True)
        )
