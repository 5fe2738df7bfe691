"""Call FLA's reference implementations of attention, `fla/ops/*/naive.py`, in place of its kernels: `by_naive`.

Features of the kernels that the references lack are added here: float64 throughout, packed sequences, fewer queries than
keys, and defaults of arguments. `recurrent` calls the references of recurrences.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from titanplans.errors import KernelError
from titanplans.kernels.layers.packing import sequences
from titanplans.kernels.precision import accumulation_dtype, out_of_graphs, without_autocast
from titanplans.kernels.widen import Widen
from titanplans.torch_private.dispatch import tree_map

_WITHOUT_EFFECT = ("cu_seqlens_cpu", "chunk_indices", "checkpoint_level")
"""Arguments that only decide how a kernel splits its work."""


class Naive(NamedTuple):
    """A reference implementation."""

    place: str
    """The reference's module and name: "fla.ops.parallax.naive:naive_parallax"."""
    check: Callable[[dict[str, Any]], None] | None = None
    """Refuses arguments that the kernel refuses or interprets differently."""


def by_naive(kernel: Callable[..., Any], reference: Naive) -> Callable[..., Any]:
    """Return a function with the arguments of `kernel` that calls the `reference`.

    Inputs and outputs are [B, T, ...]; states are [N, ...] or tuples of such tensors, where N is the number of packed
    sequences, or B. If there are fewer queries than keys, they belong to the last keys. The output has the dtype of v, and
    torch differentiates it.

    The returned function raises:
        KernelError: an argument is set that the reference does not have.
    """
    module, _, name = reference.place.partition(":")
    signature = inspect.signature(kernel)
    one_output = signature.return_annotation in (torch.Tensor, "torch.Tensor")

    @out_of_graphs(kernel)
    @functools.wraps(kernel)
    def compute(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        arguments = {
            key: value for key, value in arguments.items() if value is not None and value is not False
        }
        if reference.check is not None:
            reference.check(arguments)
        naive = getattr(importlib.import_module(module), name)
        result = _compute(kernel.__name__, naive, arguments)
        return result[0] if one_output and isinstance(result, tuple) else result

    return compute


def _compute(kernel: str, naive: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call `naive` with the `arguments` of the call of `kernel` that are neither None nor False."""
    parameters = inspect.signature(naive).parameters
    if unknown := [name for name in arguments if name not in {*parameters, *_WITHOUT_EFFECT, "cu_seqlens"}]:
        raise KernelError(
            f"{kernel}: {unknown[0]} is not computed on a CPU: {naive.__module__}.{naive.__name__}, FLA's own reference, "
            "has no such argument; leave it out or run on a GPU"
        )
    bounds, states = arguments.pop("cu_seqlens", None), arguments.pop("initial_state", None)
    inputs = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    options = {name: arguments[name] for name in arguments.keys() - inputs.keys() - set(_WITHOUT_EFFECT)}
    if "scale" in parameters:
        options.setdefault("scale", inputs["q"].shape[-1] ** -0.5)
    dtype, out_dtype = accumulation_dtype(*inputs.values()), inputs["v"].dtype
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    with without_autocast(inputs["v"]), Widen(dtype):
        results = []
        for n, sequence in _sequences(inputs, bounds):
            if states is not None:
                state = states if n is None else tree_map(lambda x, n=n: x[n : n + 1], states)
                sequence["initial_state"] = tree_map(lambda x: x.to(dtype), state)
            results.append(_call_with_padded_queries(naive, sequence, options))
    if not isinstance(results[0], tuple):
        return torch.cat(results, 1).to(out_dtype)
    outputs, seconds = zip(*results, strict=True)
    # The second output has final states, concatenated over sequences, or a tensor per token, such as attention weights.
    dim = 0 if "output_final_state" in parameters else 1
    second = None if seconds[0] is None else tree_map(lambda *xs: torch.cat(xs, dim), *seconds)
    return torch.cat(outputs, 1).to(out_dtype), second


def _sequences(inputs: dict[str, torch.Tensor], bounds: Any) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield the index and the inputs of each sequence; `bounds` may be a pair, for queries and for keys and values."""
    if not isinstance(bounds, tuple):
        yield from sequences(inputs, bounds)
        return
    keys = {name: inputs[name] for name in ("k", "v")}
    queries = {name: x for name, x in inputs.items() if name not in keys}
    pairs = zip(sequences(queries, bounds[0]), sequences(keys, bounds[1]), strict=True)
    yield from (
        (n, queries_of_sequence | keys_of_sequence)
        for (n, queries_of_sequence), (_, keys_of_sequence) in pairs
    )


def _call_with_padded_queries(
    naive: Callable[..., Any], inputs: dict[str, Any], options: dict[str, Any]
) -> Any:
    """Call `naive`, which needs as many queries as keys: pad queries at the front, and remove the outputs of the padding."""
    queries, keys = inputs["q"].shape[1], inputs["k"].shape[1]
    if queries == keys:
        return naive(**inputs, **options)

    def padded(x: Any) -> Any:
        is_short = isinstance(x, torch.Tensor) and x.shape[1] == queries
        return F.pad(x, (*(0, 0) * (x.ndim - 2), keys - queries, 0)) if is_short else x

    result = naive(**{name: padded(x) for name, x in inputs.items()}, **options)
    return tree_map(lambda x: x[:, keys - queries :], result)
