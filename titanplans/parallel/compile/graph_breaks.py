"""Place the graph breaks of a compiled block: at FLA's kernels, and where tokens are sent to other ranks."""

import inspect
from collections.abc import Iterator
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from titanplans.split.decoder import has_fla_module, is_fla_class
from titanplans.split.state import specialise, state_of, subclass
from titanplans.text import class_name
from titanplans.torch_private.compile import enable_nested_graph_breaks, is_disabled


def calls_kernels(block: nn.Module) -> bool:
    """Whether `block` has modules of flash-linear-attention, or of other libraries that call its kernels."""
    return has_fla_module(block) or any(_calls_disabled(type(module)) for module in block.modules())


@cache
def _calls_disabled(cls: type[nn.Module]) -> bool:
    """Whether the forward of `cls` calls a function that torch.compile is disabled for, directly or from a closure."""
    forward = inspect.unwrap(cls.forward)
    called = (forward.__globals__.get(name) for name in _names(forward.__code__))
    functions = [value for value in called if isinstance(value, FunctionType)]
    enclosed = (cell.cell_contents for f in functions for cell in f.__closure__ or ())
    return any(map(is_disabled, [*functions, *filter(callable, enclosed)]))


def end_graphs_at_kernels(block: nn.Module) -> None:
    """Exclude FLA's leaf modules that call its kernels from the graphs of `block`.

    FLA disables torch.compile for its kernels. The kernels are called inside autograd Functions, where dynamo can't
    continue a graph. The code around a kernel (a check of its inputs, a reshape) would become graphs of one or two
    operators. Each of these graphs would have guards to check at every call, and would count towards torch's limit of
    recompilations. So the module around the kernel is excluded instead.

    The rest of the block then is one graph from kernel to kernel, across modules, so a collective at a region's border is in
    one graph with the matrix product of its output. That needs torch's setting `nested_graph_breaks`, which holds for the
    process; torch uses its value when a block first runs. On torch 2.11, where that setting is broken, each module is one
    graph.
    """
    for module in block.modules():
        cls = type(module)
        if is_fla_class(cls) and next(module.children(), None) is None and _leads_out(cls):
            specialise(
                module,
                _out_of_graphs(cls, "forward", f"{class_name(cls)} calls a kernel of flash-linear-attention"),
            )
    enable_nested_graph_breaks()


@cache
def _leads_out(cls: type[nn.Module]) -> bool:
    """Whether the forward of `cls` calls, also indirectly, a function that torch.compile is disabled for.

    Called functions are found by the names in the code.
    """
    if is_disabled(cls.forward):
        return False  # it is excluded already
    seen: set[int] = set()
    pending: list[Any] = [cls.forward]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_disabled(value):
            return True
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            pending.append(value.forward)
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, FunctionType) and function.__module__.startswith("fla."):
            pending += [
                function.__globals__[name]
                for name in _names(function.__code__)
                if name in function.__globals__
            ]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def sends_tokens(block: nn.Module) -> bool:
    """Whether `block` exchanges tokens for heads between ranks, or sends tokens to experts on other ranks."""
    return any(map(_sends, block.modules()))


def end_graphs_where_tokens_leave(block: nn.Module) -> None:
    """Exclude modules that send tokens, with their hooks, from the graphs of `block`; the code between them is compiled.

    A mixer gets a `ShardedSequence` (`titanplans.split.tokens`), a tensor subclass that can't be traced, and the number of
    tokens that experts receive is known only on the host.
    """
    for module in block.modules():
        if _sends(module):
            specialise(module, _out_of_graphs(type(module), "__call__", "it sends tokens to other ranks"))
    enable_nested_graph_breaks()


def _sends(module: nn.Module) -> bool:
    state = state_of(module)
    return state is not None and (state.exchanges or state.experts is not None)


@cache
def _out_of_graphs(cls: type[nn.Module], method: str, reason: str) -> type[nn.Module]:
    """Return a subclass of `cls` with torch.compile disabled for `method`; cached, so that equal modules share a class."""
    return subclass(
        cls, {method: torch.compiler.disable(getattr(cls, method), reason=reason)}, "outside_of_graphs"
    )
