"""The policies that recompute whole modules, and how a policy is applied.

A policy is a frozen dataclass; `apply(model)` wraps modules in place in torch's non-reentrant checkpoint, under their own
names in state dicts. A model has one policy. What is kept inside of a recomputed block is in `selective` (outputs of
operators) and `keep_mixer` (a module).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self

from torch import nn

from titanplans.errors import OptionError, ParallelError
from titanplans.tensor_parallel.decoder import Block, find_block, find_decoder
from titanplans.torch_private import ActivationWrapper, checkpoint_wrapper

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What surrounds the forward of one checkpointed call, and what surrounds its recomputation."""

Scope = Literal["all", "language", "vision"]
_SCOPES: tuple[Scope, ...] = ("all", "language", "vision")

_BUDGET = "_activation_memory_budget"


class Policy(Protocol):
    """Something that says what is recomputed: one of ours, or of torchtitan's."""

    def apply(self, model: nn.Module) -> None:
        """Wrap modules of `model` in place."""
        ...


@dataclass(frozen=True, kw_only=True)
class BlockPolicy:
    """What every policy here has in common: it treats each block of some lists alike."""

    scope: Scope = "all"
    """Which lists of blocks: the decoder's (language), those of vision towers (vision), or all of them."""

    nothing: ClassVar[str] = "its lists of blocks are empty"
    """Why no module may be found to recompute."""

    def __post_init__(self) -> None:
        if self.scope not in _SCOPES:
            raise OptionError("activation_checkpoint.scope", self.scope, f"take one of {', '.join(_SCOPES)}")

    def build(self, *, dump_folder: str) -> Self:
        """Return the policy: torchtitan's configs are built into one."""
        return self

    def check(self, model: nn.Module) -> list[str]:
        """Return the names of the modules that `apply` would wrap; nothing is touched.

        Raises:
            ParallelError: there is nothing to recompute, or the model has a policy already.
            PlanError: `model` has no list of blocks.
        """
        found = []
        for names in _block_lists(model, self.scope):
            for index, name in enumerate(names):
                block = find_block(model.get_submodule(name), name)
                _refuse_second_policy(model, block.module)
                found.append(self.part(block, index))
        _refuse_own_checkpointing(model)
        if not any(found):
            raise ParallelError(f"{self} recomputes nothing of {type(model).__name__}: {self.nothing}")
        return [name for name in found if name is not None]

    def apply(self, model: nn.Module) -> None:
        """Wrap what the policy recomputes in the blocks of `model`, in place; raises what `check` does."""
        for name in self.check(model):
            self.wrap(model, name)

    def part(self, block: Block, index: int) -> str | None:
        """Return the name of what is wrapped in `block`, number `index` of its list; None for nothing."""
        return block.name

    def wrap(self, model: nn.Module, name: str) -> None:
        """Wrap the module called `name`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Full(BlockPolicy):
    """Recompute every block: of each, its input alone is kept."""

    preserve_rng_state: bool = True
    """Restore the random state for the recomputation, so that dropout drops the same."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and types of what is recomputed with what was first computed, or don't."""

    debug: bool = False
    """Record what is recomputed, for a mismatch's error message; slow."""

    early_stop: bool = False
    """End a recomputation at the last tensor that the backward needs: a block's last product, and under
    tensor parallelism its last collective, are not repeated. Not where FSDP units lie inside what is
    recomputed: their hooks after the forward would be skipped."""

    def wrap(self, model: nn.Module, name: str, context_fn: Callable[[], Contexts] | None = None) -> None:
        """Wrap the module called `name`; `context_fn` as torch.utils.checkpoint has it."""
        options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        for option in ("preserve_rng_state", "determinism_check", "debug", "early_stop"):
            options[option] = getattr(self, option)
        replace(model, name, partial(checkpoint_wrapper, **options))


@dataclass(frozen=True)
class EveryNthLayer(Full):
    """Recompute every n-th block and keep the others: blocks n-1, 2n-1, … of each list."""

    n: int
    nothing: ClassVar[str] = "every one of its lists of blocks is shorter than n"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 1:
            raise OptionError(
                "activation_checkpoint.selective_ac_option",
                self.n,
                "every n-th layer is recomputed, and n is a whole number, 1 or more",
            )

    def part(self, block: Block, index: int) -> str | None:
        return block.name if (index + 1) % self.n == 0 else None


@dataclass(frozen=True, kw_only=True)
class MLPOnly(Full):
    """Recompute the MLP of every block, and keep the rest."""

    nothing: ClassVar[str] = "none of its blocks has an MLP under one of the usual names"

    def part(self, block: Block, index: int) -> str | None:
        return block.mlp


@dataclass(frozen=True)
class MemoryBudget(BlockPolicy):
    """Let the compiler choose what it recomputes of each compiled block; nothing happens to others."""

    budget: float = 0.5
    """0 recomputes everything in the compiled region, 1 what the compiler would anyway."""

    pareto_folder: str | None = None
    """Draw time against memory for budgets from 0 to 1 into this folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.budget <= 1:
            raise OptionError(
                "activation_checkpoint.memory_budget", self.budget, "it is a fraction from 0 to 1"
            )

    def settings(self) -> dict[str, Any]:
        """Return AOTAutograd's settings for this budget."""
        settings: dict[str, Any] = {"activation_memory_budget": self.budget}
        if self.pareto_folder is not None:
            settings |= {
                "visualize_memory_budget_pareto": True,
                "memory_budget_pareto_dir": self.pareto_folder,
            }
        return settings

    def wrap(self, model: nn.Module, name: str) -> None:
        if self.pareto_folder is not None:
            Path(self.pareto_folder).mkdir(parents=True, exist_ok=True)
        model.get_submodule(name).__dict__[_BUDGET] = self


def apply_activation_checkpointing(model: nn.Module, policy: Any, dump_folder: str) -> None:
    """Apply what `policy.build` returns to the blocks of `model`, in place.

    Args:
        model: the model.
        policy: one of ours, or a torchtitan ActivationCheckpointing.Config, whose policies treat the children of `layers`.
        dump_folder: folder for what a policy writes.
    """
    built: Policy = policy.build(dump_folder=dump_folder)
    if not isinstance(built, BlockPolicy):
        first = find_decoder(model).names[0]
        blocks = nn.Module()
        blocks.layers = model.get_submodule(first.rpartition(".")[0])
        model = blocks
    built.apply(model)


def memory_budget(block: nn.Module) -> MemoryBudget | None:
    """Return the budget that was applied to `block`, for the compiler."""
    return block.__dict__.get(_BUDGET)


def is_recomputed(module: nn.Module) -> bool:
    """Whether a policy was applied to `module`."""
    return isinstance(module, ActivationWrapper) or memory_budget(module) is not None


def replace(model: nn.Module, name: str, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Put `wrapper(module)` in the place of the module called `name`."""
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).register_module(child, wrapper(model.get_submodule(name)))


def _block_lists(model: nn.Module, scope: Scope) -> Sequence[tuple[str, ...]]:
    """Return the fully qualified names of the blocks in `scope`, list by list.

    Raises:
        ParallelError: the scope is vision, and `model` has no vision tower with blocks.
        PlanError: the scope is another, and `model` has no decoder.
    """
    decoder = find_decoder(model, required=scope != "vision")
    if scope == "vision" and not decoder.towers:
        raise OptionError(
            "activation_checkpoint.scope",
            scope,
            f'{type(model).__name__} has no vision tower with blocks: set it to "all" or "language"',
        )
    return {"all": decoder.block_lists, "language": (decoder.names,), "vision": decoder.towers}[scope]


def _refuse_second_policy(model: nn.Module, block: nn.Module) -> None:
    if any(map(is_recomputed, block.modules())):
        raise ParallelError(
            f"{type(model).__name__} is checkpointed already: one policy, applied once; build the model again"
        )


def _refuse_own_checkpointing(model: nn.Module) -> None:
    # transformers'; its name until version 5.
    name = "is_activation_checkpointing"
    if getattr(model, name if hasattr(model, name) else "is_gradient_checkpointing", False):
        raise ParallelError(
            f"{type(model).__name__} recomputes its blocks itself: call gradient_checkpointing_disable() before "
            "another policy"
        )
