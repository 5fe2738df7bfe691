"""`work_of`: what an operator costs a GPU: its multiplications and additions, the bytes that it moves, or its collective."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from titanplans.observe.operators import NAMESPACES, Collective, describe
from titanplans.torch_private.dispatch import named_arguments, schema, tree_leaves, written_tensors

_TRITON = "triton::"
_ATTENTION = "_scaled_dot_product_"
_NO_KERNEL = frozenset(
    (
        "_unsafe_view",
        "_wrap_tensor_autograd",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
        "lift_fresh",
        "new_empty",
        "new_empty_strided",
        "set_",
        "wait_tensor",
    )
)
_GROUPED_PRODUCTS = frozenset(("_grouped_mm", "_scaled_grouped_mm"))
"""Products of experts, whose multiplications torch's table does not count."""
_LOOKUPS = frozenset(("embedding", "gather", "index", "index_select"))
"""Operators that read as many elements of their first input as they return."""


class Work(NamedTuple):
    """What one operator costs."""

    operator: str
    flops: int
    """Multiplications and additions of matrix products and of attention; 0 for all other operators."""
    bytes: int
    """Bytes that are read from and written to memory, if nothing stays in a cache."""
    dtype: torch.dtype | None
    """The data type of a product's inputs."""
    collective: Collective | None = None

    @property
    def is_attention(self) -> bool:
        """Whether the operator is fused attention."""
        return _ATTENTION in self.operator

    @property
    def is_triton(self) -> bool:
        """Whether it is a kernel of Triton, of which only the bytes are known."""
        return self.operator.startswith(_TRITON)


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work | None:
    """Return the cost of a call of an operator with real or fake tensors; None if it launches no kernel."""
    declared = schema(func)
    if declared is None:
        return None
    namespace, _, name = declared.name.partition("::")
    if name in _NO_KERNEL or namespace == "prim" or getattr(func, "is_view", False):
        return None
    if namespace in NAMESPACES and (collective := describe(func, args, kwargs, result)) is not None:
        return Work(declared.name, 0, 0, None, collective) if collective.ranks > 1 else None
    inputs = _tensors((args, kwargs))
    results = sum(map(_bytes, written_tensors(func, args, kwargs) or _tensors(result)))
    moved = results + (results if name in _LOOKUPS else sum(map(_bytes, inputs)))
    if not moved:
        return None
    dtype = next((x.dtype for x in inputs if x.is_floating_point()), None)
    return Work(declared.name, _flops(func, args, kwargs, result), moved, dtype)


def work_of_kernel(name: str, tensors: Iterable[torch.Tensor]) -> Work:
    """Return the cost of a launch of a kernel of Triton: each of its tensors is read or written once.

    What it computes is not known.
    """
    return Work(_TRITON + name, 0, sum(map(_bytes, tensors)), None)


def _flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    if _ATTENTION in schema(func).name:
        named = named_arguments(func, args, kwargs)
        q, k, v = (named[argument] for argument in ("query", "key", "value"))
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        if named.get("is_causal"):
            pairs //= 2
        forward = 2 * pairs * (q.shape[3] + v.shape[3])
        # Dao et al. 2022, "FlashAttention": the backward has five products of this size, and the forward two.
        return forward * 5 // 2 if "backward" in schema(func).name else forward
    if schema(func).name.partition("::")[2] in _GROUPED_PRODUCTS:
        left, right = args[:2]
        # [tokens, in] x [experts, in, out]: each row of `left` is multiplied by the matrix of one expert.
        # [in, tokens] x [tokens, out]: in the gradient of the weights, each token belongs to one expert.
        # [experts, out, in] x [in, tokens]: each column of `right` is multiplied by the matrix of one expert.
        columns_of_experts = left.ndim == 3 and right.ndim == 2
        return 2 * (right.numel() * left.shape[-2] if columns_of_experts else left.numel() * right.shape[-1])
    count = flop_registry.get(getattr(func, "overloadpacket", None))
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _bytes(x: torch.Tensor) -> int:
    # An expanded tensor has more elements than its storage.
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
