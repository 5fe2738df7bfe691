"""What a head returns where it has computed the loss: a tensor of the logits' shape without their numbers.

It carries the loss, and takes its gradient back to the head, through whatever hooks (FSDP2's, DDP's) hang on what modules
return. What the model's code does to its logits it can't do to them any more: the head has done it before, and here it is
compared. Whatever else reads the logits is refused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from titanplans.errors import ParallelError
from titanplans.loss.shares import Objective
from titanplans.torch_private.autograd import version
from titanplans.torch_private.dispatch import without_torch_function

PROBE = torch.linspace(-100, 100, 41, dtype=torch.float64)
"""Logits on which two functions are the same if they are."""

_ELEMENTWISE = frozenset(
    (
        "mul",
        "div",
        "true_divide",
        "tanh",
        "clamp",
        "add",
        "sub",
        "__mul__",
        "__rmul__",
        "__truediv__",
        "__add__",
        "__sub__",
    )
)
_CASTS = frozenset(("to", "float", "double", "bfloat16", "half", "contiguous", "type"))
_ASKS = frozenset(
    ("size", "dim", "numel", "stride", "is_floating_point", "register_hook", "is_contiguous", "__len__")
)
_FIELDS = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "ndim",
        "is_leaf",
        "grad_fn",
        "layout",
        "_base",
        "is_cuda",
        "is_cpu",
        "is_meta",
    )
)


REMEDY = "switch the fused loss off (loss.fused = false)"


class NotFused(ParallelError):
    """The head can't compute the loss for this model, or for this use of its logits: the reason and the remedy."""

    def __init__(self, reason: str, remedy: str = REMEDY):
        super().__init__(reason, remedy)
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(self.args)


class Computed(NamedTuple):
    """What a head has computed the loss of."""

    labels: torch.Tensor
    version: int
    """Of the labels: how often they had been changed in place."""
    objective: Objective
    after_head: Callable[[torch.Tensor], torch.Tensor] | None
    """What the head has done to its logits on the model's behalf."""
    recorded: bool
    """Whether it has computed gradients."""
    probe: torch.Tensor = PROBE
    """What the model's code has made of these logits since."""


class DeferredLogits(torch.Tensor):
    """Stands in for logits [..., vocabulary]: `cross_entropy` of it and of the head's labels is the loss."""

    deferred = True
    """The head of a split model hands it on as it is."""
    of: "Computed"
    collected: torch.Tensor | None = None

    def loss(self, labels: torch.Tensor, objective: Objective) -> torch.Tensor:
        """Return the summed loss, a scalar.

        Raises:
            NotFused: see `check`.
            ParallelError: the head was given other labels, or another objective, or has computed no gradients.
        """
        self.check()
        if self.requires_grad and not self.of.recorded:
            raise ParallelError(
                "a gradient is asked for of a loss that the head computed without one: a checkpoint around the model "
                "with use_reentrant = True computes the forward without gradients; use use_reentrant = False"
            )
        if labels is not self.of.labels and not _same(labels, self.of.labels):
            raise ParallelError(
                "labels other than those that the head was given, which has computed the loss: give cross_entropy the same"
            )
        if version(labels) != self.of.version:
            raise ParallelError(
                "the labels were changed in place after the head has computed their loss: change them before the forward"
            )
        if objective != self.of.objective:
            raise ParallelError(
                f"{objective} for cross_entropy, and the head computed the loss by {self.of.objective}: give both the same"
            )
        return self._collect()

    def check(self) -> None:
        """Check that the model's code has done to its logits what the head did on its behalf.

        Raises:
            NotFused: it has not.
        """
        after, probe = self.of.after_head, self.of.probe
        expected = PROBE if after is None else after(PROBE)
        if not torch.allclose(probe, expected, rtol=1e-6, atol=0):
            at = int((probe - expected).abs().argmax())
            raise NotFused(
                f"after its head the model makes {probe[at].item():.6g} of a logit of {PROBE[at].item():.6g}, and the "
                f"head, which computes the loss, {expected[at].item():.6g}, and its config says nothing of that"
            )

    def _collect(self) -> torch.Tensor:
        with without_torch_function():
            if self.collected is not None and torch.is_grad_enabled():
                return self.collected  # two losses of the same: their gradients are added as scalars
            found = cast(torch.Tensor, _SpreadGradient.apply(self))
            self.collected = found if found.requires_grad else None
            return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        first = args[0] if args else None
        with without_torch_function():
            if name in _ASKS or name in _FIELDS:
                return func(*args, **kwargs)
            rest = (*args[1:], *kwargs.values())
            if isinstance(first, DeferredLogits) and not any(isinstance(x, torch.Tensor) for x in rest):
                if name in _CASTS:
                    return first
                if name == "clone":  # DDP's, which looks for parameters that are not used
                    return stand_in(_SpreadGradient.apply(first), first.shape, first.of)
                if name in _ELEMENTWISE:
                    probe = func(first.of.probe, *args[1:], **kwargs)
                    return stand_in(_SpreadGradient.apply(first), first.shape, first.of._replace(probe=probe))
        raise NotFused(
            f"{name} of logits that don't exist, since the head computes the loss chunk by chunk",
            f"leave them to cross_entropy, or {REMEDY}",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeferredLogits(for logits of shape {tuple(self.shape)})"

    __str__ = __repr__
    __format__ = cast(Any, lambda self, spec: repr(self))


def stand_in(loss: torch.Tensor, shape: tuple[int, ...], computed: Computed) -> DeferredLogits:
    """Return what stands in for logits of `shape`, whose summed loss is the scalar `loss`."""
    made = cast(DeferredLogits, _Spread.apply(loss, shape))
    made.of = computed
    return made


def _same(labels: torch.Tensor, others: torch.Tensor) -> bool:
    """Whether these are the same labels, also in another view, without reading them."""
    return labels.data_ptr() == others.data_ptr() and labels.numel() == others.numel()


def _repeated(spread: torch.Tensor) -> torch.Tensor:
    """Return the number that `spread` repeats; 0 where there are no tokens."""
    return spread[(0,) * spread.ndim] if spread.numel() else spread.sum()


class _Spread(torch.autograd.Function):
    """A scalar as a tensor of a shape, in no more memory; no view, since FSDP2 warns of those. Its gradient is repeated."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.empty_strided(shape, (0,) * len(shape), dtype=loss.dtype, device=loss.device)
        if made.numel():
            made.as_strided((), ()).copy_(loss)
        made.__class__ = DeferredLogits  # as_subclass would make a view
        return made

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        if any(stride for size, stride in zip(grad.shape, grad.stride(), strict=True) if size > 1):
            raise ParallelError(
                "a hook has changed the gradient of logits that don't exist, since the head computes the loss chunk by "
                f"chunk: remove the hook, or {REMEDY}"
            )
        return _repeated(grad), None


class _SpreadGradient(torch.autograd.Function):
    """The scalar that was spread; the backward repeats its gradient, in no more memory."""

    @staticmethod
    def forward(ctx: Any, spread: torch.Tensor) -> torch.Tensor:
        ctx.shape = spread.shape
        return _repeated(spread).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return grad.expand(ctx.shape)
