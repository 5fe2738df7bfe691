"""Where the graphs of a compiled block end: at FLA's kernels, and where tokens go to other ranks.

FLA takes its kernels out of every graph (`torch.compiler.disable`), but one call too deep: inside of autograd
Functions, where a graph can't be taken up again. The code around a kernel there (a guard of its inputs, a
reshape) would become graphs of an operator or two, each with guards to check at every call and with a place among the
compilations of one function that torch counts. So the module around such a kernel leaves the graph whole.

Mixers and experts that send tokens leave it, too: a mixer's code is given a `ShardedSequence` (`titanplans.split.tokens`), a
subclass of tensor that is not for a graph, and how many rows come to experts is known on the host alone. What lies between
them works on own tokens, and is compiled.
"""

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
from titanplans.torch_private.compile import break_graphs_in_calls, is_disabled


def calls_kernels(block: nn.Module) -> bool:
    """Whether `block` holds modules of flash-linear-attention, or others, as of transformers, that call its kernels."""
    return has_fla_module(block) or any(_calls_disabled(type(module)) for module in block.modules())


@cache
def _calls_disabled(cls: type[nn.Module]) -> bool:
    """Whether the forward of `cls` calls a function that is out of every graph, or one that chose such a function."""
    forward = inspect.unwrap(cls.forward)
    called = (forward.__globals__.get(name) for name in _names(forward.__code__))
    functions = [value for value in called if isinstance(value, FunctionType)]
    chosen = (cell.cell_contents for f in functions for cell in f.__closure__ or ())
    return any(map(is_disabled, [*functions, *filter(callable, chosen)]))


def end_graphs_at_kernels(block: nn.Module) -> None:
    """Take the modules of `block` out of its graphs that are nothing but calls of kernels that FLA takes out.

    The rest of the block then is one graph from kernel to kernel, whatever modules lie between: a collective at
    a region's border stands in one graph with the product that reads it. That needs torch's setting
    `nested_graph_breaks`, which is the process's and read when a block first runs. On torch 2.11, where that setting is
    broken, each module is a graph of its own.
    """
    for module in block.modules():
        cls = type(module)
        if is_fla_class(cls) and next(module.children(), None) is None and _leads_out(cls):
            specialise(
                module,
                _out_of_graphs(cls, "forward", f"{class_name(cls)} calls a kernel of flash-linear-attention"),
            )
    break_graphs_in_calls()


@cache
def _leads_out(cls: type[nn.Module]) -> bool:
    """Whether the forward of `cls` leads to a function that is out of every graph, by the names that its code mentions."""
    if is_disabled(cls.forward):
        return False  # as it is
    seen: set[int] = set()
    waiting: list[Any] = [cls.forward]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_disabled(value):
            return True
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            waiting.append(value.forward)
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, FunctionType) and function.__module__.startswith("fla."):
            waiting += [
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
    """Whether in `block` tokens are exchanged for heads, or sent to experts."""
    return any(map(_sends, block.modules()))


def end_graphs_where_tokens_leave(block: nn.Module) -> None:
    """Take such modules of `block` out of its graphs, with their hooks; the rest is a graph before and one behind each."""
    for module in block.modules():
        if _sends(module):
            specialise(module, _out_of_graphs(type(module), "__call__", "it sends tokens to other ranks"))
    break_graphs_in_calls()


def _sends(module: nn.Module) -> bool:
    state = state_of(module)
    return state is not None and (state.exchanges or state.experts is not None)


@cache
def _out_of_graphs(cls: type[nn.Module], method: str, reason: str) -> type[nn.Module]:
    """Return a subclass of `cls` whose `method` stays out of graphs; blocks share it."""
    return subclass(
        cls, {method: torch.compiler.disable(getattr(cls, method), reason=reason)}, "outside_of_graphs"
    )
