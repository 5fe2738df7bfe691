"""Where torch.compile would go on without compiling: refused at the start, or made an error when it happens.

It is switched off by a variable of the environment, told to swallow its errors, given an option that a device has
no use for, or it has compiled one function too often. By itself torch then runs the model as it is, eagerly.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from titanplans.errors import ParallelError
from titanplans.torch_private.compile import dynamo_config, dynamo_errors

F = TypeVar("F", bound=Callable[..., Any])

RECOMPILATIONS = 8
"""How often one kind of block, the loss or the optimizer's step may be compiled: torch's own limit for one function. The
first time, for evaluation, for another length, from then on for any; and as much again."""


def check_switched_on() -> None:
    """Raise ParallelError if something outside of the options makes torch.compile do nothing, or hide its errors."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        raise ParallelError(
            "compile.enable = true, but TORCHDYNAMO_DISABLE=1 in the environment switches torch.compile off: unset it, or "
            "set compile.enable to false"
        )
    if dynamo_config().disable:
        raise ParallelError(
            "compile.enable = true, but torch.compile is switched off (TORCH_COMPILE_DISABLE=1 in the environment, or "
            "torch._dynamo.config.disable): unset it, or set compile.enable to false"
        )
    if dynamo_config().suppress_errors:
        raise ParallelError(
            "compile.enable = true, but errors of the compiler are suppressed, and what fails would run eagerly "
            "(TORCHDYNAMO_SUPPRESS_ERRORS in the environment, or torch._dynamo.config.suppress_errors): unset it"
        )


def count_kinds(blocks: Iterable[nn.Module]) -> int:
    """Return the number of kinds of blocks; blocks of one kind share compiled code.

    Blocks are of one kind if their modules are of the same classes, have the same flags and names of variants (a
    layer's number is neither), and parameters of the same shapes.
    """
    return len({_kind(block) for block in blocks})


def _kind(block: nn.Module) -> Any:
    modules = tuple(
        (
            type(module),
            frozenset(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, bool | str) and name[0] != "_"
            ),
        )
        for module in block.modules()
    )
    return modules, tuple(parameter.shape for parameter in block.parameters())


def compile_at_most(function: Callable[..., Any], limit: int, **options: Any) -> Callable[..., Any]:
    """Return what `torch.compile(function, **options)` returns, which then compiles `limit` times at most."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        arguments: Any = {**options, "recompile_limit": limit}  # torch's overloads leave it out
        return torch.compile(function, **arguments)
    compiled = torch.compile(function, **options)

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:  # torch 2.11 has one limit for the process
        with dynamo_config().patch(recompile_limit=limit):
            return compiled(*args, **kwargs)

    return call


def limited(compiled: F, what: str, limit: int) -> F:
    """Return `compiled`, a result of torch.compile, such that a limit that is reached is an error in one line.

    Args:
        compiled: to be called.
        what: its name, for the error.
        limit: that was given to `compile_at_most`.
    """
    # The setting is the process's: without it torch runs a function eagerly from the limit on.
    dynamo_config().fail_on_recompile_limit_hit = True

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except dynamo_errors().FailOnRecompileLimitHit as error:
            raise ParallelError(
                f"compile: something in {what} was compiled {limit} times, and the next call needs it again, which torch "
                "would run eagerly: give it fewer different shapes, set compile.dynamic to true (or leave it out), or "
                "switch compile off; TORCH_LOGS=recompiles names the reasons"
            ) from error

    return call  # pyrefly: ignore[bad-return]
