"""FLA's own references for all forms of attention, `fla/ops/*/naive.py`, in place of its kernels: `by_naive`.

They lack some features of their kernels, which are added here: float64 throughout, packed sequences, fewer queries than
keys, and defaults of arguments that only the kernel has. References of recurrences are called by `recurrent`.
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
"""How a kernel splits its work."""


class Naive(NamedTuple):
    """A reference by its name, "fla.ops.parallax.naive:naive_parallax"."""

    place: str
    check: Callable[[dict[str, Any]], None] | None = None
    """Refuses arguments, by name, that the kernel refuses or takes for others."""


def by_naive(kernel: Callable[..., Any], reference: Naive) -> Callable[..., Any]:
    """Return a function with the arguments of `kernel` that computes by the `reference`.

    Inputs and outputs are [B, T, ...], states [N, ...] or tuples of such, with N the number of packed sequences, or B. Fewer
    queries than keys are the last ones. The output has the dtype of v, and is differentiated by torch.

    The function raises:
        KernelError: an argument is set that the reference does not have.
    """
    module, _, name = reference.place.partition(":")
    signature = inspect.signature(kernel)
    one_output = signature.return_annotation in (torch.Tensor, "torch.Tensor")

    @out_of_graphs(kernel)
    @functools.wraps(kernel)
    def compute(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given = {key: value for key, value in given.items() if value is not None and value is not False}
        if reference.check is not None:
            reference.check(given)
        naive = getattr(importlib.import_module(module), name)
        result = _compute(kernel.__name__, naive, given)
        return result[0] if one_output and isinstance(result, tuple) else result

    return compute


def _compute(kernel: str, naive: Callable[..., Any], given: dict[str, Any]) -> Any:
    """`given` are the arguments that were, by name, without those that are None or False."""
    has = inspect.signature(naive).parameters
    if unknown := [name for name in given if name not in {*has, *_WITHOUT_EFFECT, "cu_seqlens"}]:
        raise KernelError(
            f"{kernel}: {unknown[0]} is not computed on a CPU: {naive.__module__}.{naive.__name__}, FLA's own reference, "
            "has no such argument; leave it out or run on a GPU"
        )
    bounds, state = given.pop("cu_seqlens", None), given.pop("initial_state", None)
    inputs = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    options = {name: given[name] for name in given.keys() - inputs.keys() - set(_WITHOUT_EFFECT)}
    if "scale" in has:
        options.setdefault("scale", inputs["q"].shape[-1] ** -0.5)
    dtype, out_dtype = accumulation_dtype(*inputs.values()), inputs["v"].dtype
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    with without_autocast(inputs["v"]), Widen(dtype):
        results = []
        for n, part in _sequences(inputs, bounds):
            if state is not None:
                own = state if n is None else tree_map(lambda x, n=n: x[n : n + 1], state)
                part["initial_state"] = tree_map(lambda x: x.to(dtype), own)
            results.append(_of_last_queries(naive, part, options))
    if not isinstance(results[0], tuple):
        return torch.cat(results, 1).to(out_dtype)
    outputs, seconds = zip(*results, strict=True)
    joined = (
        0 if "output_final_state" in has else 1
    )  # states by sequences; what is beside the output, by tokens
    second = None if seconds[0] is None else tree_map(lambda *xs: torch.cat(xs, joined), *seconds)
    return torch.cat(outputs, 1).to(out_dtype), second


def _sequences(inputs: dict[str, torch.Tensor], bounds: Any) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yield index and inputs of each sequence; `bounds` may be a pair, of the queries and of the keys."""
    if not isinstance(bounds, tuple):
        yield from sequences(inputs, bounds)
        return
    keys = {name: inputs[name] for name in ("k", "v")}
    queries = {name: x for name, x in inputs.items() if name not in keys}
    both = zip(sequences(queries, bounds[0]), sequences(keys, bounds[1]), strict=True)
    yield from ((n, part | keys_of_it) for (n, part), (_, keys_of_it) in both)


def _of_last_queries(naive: Callable[..., Any], part: dict[str, Any], options: dict[str, Any]) -> Any:
    """Call `naive`, which wants as many queries as keys: fewer are filled up in front, what comes of that is cut off."""
    given, wanted = part["q"].shape[1], part["k"].shape[1]
    if given == wanted:
        return naive(**part, **options)

    def filled(x: Any) -> Any:
        few = isinstance(x, torch.Tensor) and x.shape[1] == given
        return F.pad(x, (*(0, 0) * (x.ndim - 2), wanted - given, 0)) if few else x

    result = naive(**{name: filled(x) for name, x in part.items()}, **options)
    return tree_map(lambda x: x[:, wanted - given :], result)
