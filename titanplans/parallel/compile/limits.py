"""Raise errors where torch.compile would silently run eagerly: disabled, errors suppressed, or too many recompilations."""

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
"""How often one kind of block, the loss or the optimizer's step may be compiled: torch's limit for one function.

Four compilations are normal (the first one, evaluation, a second length, dynamic lengths); this is twice as many."""


def check_switched_on() -> None:
    """Raise ParallelError if the environment or torch's config disables torch.compile or suppresses its errors."""
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
            "compile.enable = true, but errors of the compiler are suppressed, and code that fails to compile would run "
            "eagerly (TORCHDYNAMO_SUPPRESS_ERRORS in the environment, or torch._dynamo.config.suppress_errors): unset it"
        )


def count_kinds(blocks: Iterable[nn.Module]) -> int:
    """Return the number of kinds of blocks; blocks of one kind share compiled code.

    Blocks are of one kind if their modules have the same classes, the same public attributes of type bool and str, and
    parameters of the same shapes.
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
    """Return `torch.compile(function, **options)`, with a recompilation limit of `limit`."""
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        # The type hints of torch's overloads lack this argument.
        arguments: Any = {**options, "recompile_limit": limit}
        return torch.compile(function, **arguments)
    compiled = torch.compile(function, **options)

    # torch 2.11 has only one recompilation limit, for the process.
    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with dynamo_config().patch(recompile_limit=limit):
            return compiled(*args, **kwargs)

    return call


def limited(compiled: F, what: str, limit: int) -> F:
    """Return `compiled`, wrapped so that reaching the recompilation limit raises a ParallelError.

    Args:
        compiled: a result of `compile_at_most`.
        what: its name in the error.
        limit: the argument of `compile_at_most`.
    """
    # Without this setting, which holds for the process, torch runs a function eagerly once the limit is reached.
    dynamo_config().fail_on_recompile_limit_hit = True

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except dynamo_errors().FailOnRecompileLimitHit as error:
            raise ParallelError(
                f"compile: something in {what} was compiled {limit} times, and the next call would compile it again, so "
                "torch would run it eagerly from now on: give it fewer different shapes, set compile.dynamic to true (or "
                "leave it out), or switch compile off; TORCH_LOGS=recompiles names the reasons"
            ) from error

    return call  # pyrefly: ignore[bad-return]
