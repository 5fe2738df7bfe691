"""`DeferredLogits`: the tensor that a head returns instead of logits when it has computed the loss itself.

The tensor has the logits' shape, but not their values. It carries the loss to `cross_entropy`, and the gradient back to
the head, through the hooks of FSDP2 and DDP on the outputs of modules. The head has already applied the operators that the
model's code applies to its logits after the head (a soft cap, a scale); `check` compares them with the operators that this
code then calls. All other uses of the logits are refused.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, cast

import torch

from titanplans.errors import ParallelError
from titanplans.loss.sharded_logits import Objective
from titanplans.torch_private.autograd import version
from titanplans.torch_private.dispatch import unset_fake_temporarily, without_torch_function

PROBE = torch.linspace(-100, 100, 41, dtype=torch.float64)
"""Sample logits, on which `check` compares the function that the model's code applies after the head with the function
that the head has applied."""

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
_QUERIES = frozenset(
    ("size", "dim", "numel", "stride", "is_floating_point", "register_hook", "is_contiguous", "__len__")
)
_FIELDS = frozenset(
    (
        "shape",
        "dtype",
        "device",
        "device.default",  # the operator by which autograd asks a fake tensor
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
    """The head can't compute the loss for this model, or for this use of its logits."""

    def __init__(self, reason: str, remedy: str = REMEDY):
        super().__init__(reason, remedy)
        self.reason = reason

    def __str__(self) -> str:
        return ": ".join(self.args)


class Computed(NamedTuple):
    """The labels and settings with which a head computed the loss."""

    labels: torch.Tensor
    version: int
    """torch's count of in-place changes of the labels, at the time when the head used them."""
    objective: Objective
    after_head: Callable[[torch.Tensor], torch.Tensor] | None
    """The function that the head has applied to its logits in place of the model's code; None: there is none."""
    has_gradients: bool
    """The head has computed gradients."""
    probe: torch.Tensor = PROBE
    """`PROBE`, to which the same operators were applied as the model's code has applied to these logits after the head."""


class DeferredLogits(torch.Tensor):
    """Stand-in for logits [..., vocabulary]. `cross_entropy`, called with it and the head's labels, returns the loss."""

    deferred = True
    """Tells the hooks of a split model's head to return this tensor unchanged."""
    of: "Computed"
    collected: torch.Tensor | None = None
    """The loss, after the first call of `loss` with gradients enabled; None before."""

    def loss(self, labels: torch.Tensor, objective: Objective) -> torch.Tensor:
        """Return the summed loss, a scalar.

        Raises:
            NotFused: see `check`.
            ParallelError: the head got other labels or another objective, or has computed no gradients.
        """
        self.check()
        if self.requires_grad and not self.of.has_gradients:
            raise ParallelError(
                "a gradient is needed of a loss that the head computed without gradients: a checkpoint around the "
                "model with use_reentrant = True computes the forward without gradients; use use_reentrant = False"
            )
        if labels is not self.of.labels and not _same(labels, self.of.labels):
            raise ParallelError(
                "the labels are not the ones for which the head computed the loss: give cross_entropy the same labels"
            )
        if version(labels) != self.of.version:
            raise ParallelError(
                "the labels were changed in place after the head computed the loss: change them before the forward"
            )
        if objective != self.of.objective:
            raise ParallelError(
                f"cross_entropy got {objective}, but the head computed the loss with {self.of.objective}: give both "
                "the same"
            )
        return self._collect()

    def check(self) -> None:
        """Check that the model's code after the head changes the logits in the same way as the head has already done.

        Raises:
            NotFused: the model's code changes the logits differently.
        """
        after_head, probe = self.of.after_head, self.of.probe
        with unset_fake_temporarily():  # the probe has values even in a forward on fake tensors
            self._compare(probe, PROBE if after_head is None else after_head(PROBE))

    def _compare(self, probe: torch.Tensor, expected: torch.Tensor) -> None:
        if not torch.allclose(probe, expected, rtol=1e-6, atol=0):
            worst = int((probe - expected).abs().argmax())
            raise NotFused(
                f"after its head the model turns a logit of {PROBE[worst].item():.6g} into {probe[worst].item():.6g}, "
                f"but the head, which computes the loss, turns it into {expected[worst].item():.6g}, as the model's "
                "config says"
            )

    def _collect(self) -> torch.Tensor:
        with without_torch_function():
            if self.collected is not None and torch.is_grad_enabled():
                # A second call returns the same tensor, so that autograd adds the two gradients as scalars, not as tensors
                # of the logits' shape.
                return self.collected
            loss = cast(torch.Tensor, _CollapseToScalar.apply(self))
            self.collected = loss if loss.requires_grad else None
            return loss

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name == "__get__":  # access to an attribute, whose name is the bound object's
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        first = args[0] if args else None
        with without_torch_function():
            if name in _QUERIES or name in _FIELDS:
                return func(*args, **kwargs)
            rest = (*args[1:], *kwargs.values())
            if isinstance(first, DeferredLogits) and not any(isinstance(x, torch.Tensor) for x in rest):
                if name in _CASTS:
                    return first
                if name == "clone":  # DDP clones outputs to find unused parameters
                    return stand_in(_CollapseToScalar.apply(first), first.shape, first.of)
                if name in _ELEMENTWISE:
                    with unset_fake_temporarily():
                        probe = func(first.of.probe, *args[1:], **kwargs)
                    return stand_in(
                        _CollapseToScalar.apply(first), first.shape, first.of._replace(probe=probe)
                    )
        raise NotFused(
            f"{name} was called on logits that don't exist, since the head computes the loss chunk by chunk",
            f"leave them to cross_entropy, or {REMEDY}",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeferredLogits(for logits of shape {tuple(self.shape)})"

    __str__ = __repr__
    __format__ = cast(Any, lambda self, spec: repr(self))


def stand_in(loss: torch.Tensor, shape: tuple[int, ...], computed: Computed) -> DeferredLogits:
    """Return the stand-in for logits of `shape`, whose summed loss is the scalar `loss`."""
    logits = cast(DeferredLogits, _ExpandScalar.apply(loss, shape))
    logits.of = computed
    return logits


def _same(labels: torch.Tensor, others: torch.Tensor) -> bool:
    # Compare addresses, since comparing values would synchronise with the device. Views of the same labels count as the
    # same.
    return labels.data_ptr() == others.data_ptr() and labels.numel() == others.numel()


def _scalar_of(expanded: torch.Tensor) -> torch.Tensor:
    """Return the scalar that `expanded` repeats; 0 if there are no tokens."""
    return expanded[(0,) * expanded.ndim] if expanded.numel() else expanded.sum()


@cache
def _deferred(cls: type[torch.Tensor]) -> type[DeferredLogits]:
    """Return DeferredLogits for tensors of class `cls`; a fake tensor has to stay one."""
    return DeferredLogits if cls is torch.Tensor else type(DeferredLogits.__name__, (DeferredLogits, cls), {})


class _ExpandScalar(torch.autograd.Function):
    """Expands a scalar to a shape without more memory. The backward returns the scalar that its gradient repeats."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        # Not a view of `loss`, since FSDP2 warns about outputs that are views.
        expanded = torch.empty_strided(shape, (0,) * len(shape), dtype=loss.dtype, device=loss.device)
        if expanded.numel():
            expanded.as_strided((), ()).copy_(loss)
        expanded.__class__ = _deferred(type(expanded))  # as_subclass would make a view
        return expanded

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        # A gradient with a stride is not the repeated scalar any more.
        if any(stride for size, stride in zip(grad.shape, grad.stride(), strict=True) if size > 1):
            raise ParallelError(
                "a hook has changed the gradient of logits that don't exist, since the head computes the loss chunk by "
                f"chunk: remove the hook, or {REMEDY}"
            )
        return _scalar_of(grad), None


class _CollapseToScalar(torch.autograd.Function):
    """The inverse of `_ExpandScalar`. The backward expands the scalar's gradient without more memory."""

    @staticmethod
    def forward(ctx: Any, expanded: torch.Tensor) -> torch.Tensor:
        ctx.shape = expanded.shape
        return _scalar_of(expanded).clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return grad.expand(ctx.shape)
