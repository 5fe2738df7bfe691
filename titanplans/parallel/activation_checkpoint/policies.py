"""Activation checkpointing: which part of which blocks is computed a second time in the backward.

A policy is a small frozen dataclass with `apply(model)`, which wraps modules in place. One model has one
policy. Wrapped modules keep their names in state dicts; the recomputation is torch's non-reentrant one,
and whatever it counts or keeps lives in the call (`selective`, `keep_mixer`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import nn

from titanplans.errors import ParallelError
from titanplans.parallel.blocks import SCOPES, Scope, block_lists
from titanplans.tensor_parallel.decoder import find_block, find_decoder
from titanplans.torch_private import ActivationWrapper, checkpoint_wrapper

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What surrounds the forward of one checkpointed call, and what its recomputation."""

_BUDGET = "_activation_memory_budget"


class Policy(Protocol):
    """Something that says what is recomputed."""

    def apply(self, model: nn.Module) -> None:
        """Wrap modules of `model` in place."""
        ...


@dataclass(frozen=True, kw_only=True)
class _OfBlocks:
    """What every policy of this file has in common: lists of blocks, each treated alike."""

    scope: Scope = "all"
    """Which lists of blocks: the decoder's (language), those of vision towers (vision), or all of them."""

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise ParallelError(
                f"activation checkpointing's scope = {self.scope!r}: one of {', '.join(SCOPES)}"
            )

    def build(self, *, dump_folder: str) -> "_OfBlocks":
        """Return the policy itself: torchtitan's way to a policy, here the same object."""
        return self

    def check(self, model: nn.Module) -> list[str]:
        """Return the names of the modules that `apply` would wrap; nothing is touched.

        Raises:
            ParallelError: nothing matches, or another policy was there before.
            PlanError: `model` has no list of blocks.
        """
        lists = block_lists(model, self.scope)
        _refuse_second_policy(model, lists)
        chosen = [self._chosen(model, name, index) for names in lists for index, name in enumerate(names)]
        if not any(chosen):
            raise ParallelError(
                f"{self} recomputes nothing of {type(model).__name__}: {self._nothing(lists)}"
            )
        return [name for name in chosen if name is not None]

    def apply(self, model: nn.Module) -> None:
        """Wrap what the policy recomputes in the blocks of `model`, in place; raises what `check` does."""
        for name in self.check(model):
            self._wrap(model, name)

    def _chosen(self, model: nn.Module, name: str, index: int) -> str | None:
        """Return what is wrapped of block `name`, the `index`-th of its list; None for nothing."""
        return name

    def _wrap(self, model: nn.Module, name: str) -> None:
        """Wrap the module called `name`."""
        raise NotImplementedError

    def _nothing(self, lists: list[tuple[str, ...]]) -> str:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Full(_OfBlocks):
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

    def _wrap(self, model: nn.Module, name: str) -> None:
        self.recompute(model, name)

    def recompute(
        self, model: nn.Module, name: str, context_fn: Callable[[], Contexts] | None = None
    ) -> None:
        """Wrap the module called `name`; `context_fn` as torch.utils.checkpoint has it."""
        options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
        wrapper = partial(
            checkpoint_wrapper,
            preserve_rng_state=self.preserve_rng_state,
            determinism_check=self.determinism_check,
            debug=self.debug,
            early_stop=self.early_stop,
            **options,
        )
        replace(model, name, wrapper)

    def _nothing(self, lists: list[tuple[str, ...]]) -> str:
        return "its lists of blocks are empty"


@dataclass(frozen=True)
class EveryNthLayer(Full):
    """Recompute every n-th block and keep the others: blocks n-1, 2n-1, … of each list."""

    n: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 1:
            raise ParallelError(
                f"selective_ac_option = {self.n}: every how many layers? A whole number from 1 up"
            )

    def _chosen(self, model: nn.Module, name: str, index: int) -> str | None:
        return name if (index + 1) % self.n == 0 else None

    def _nothing(self, lists: list[tuple[str, ...]]) -> str:
        return f"its lists of blocks have {', '.join(str(len(names)) for names in lists)}; n may be that many at most"


@dataclass(frozen=True, kw_only=True)
class MLPOnly(Full):
    """Recompute the MLP of every block, and keep the rest."""

    def _chosen(self, model: nn.Module, name: str, index: int) -> str | None:
        return find_block(model.get_submodule(name), name).mlp

    def _nothing(self, lists: list[tuple[str, ...]]) -> str:
        return "none of its blocks has an MLP under one of the usual names"


@dataclass(frozen=True)
class MemoryBudget(_OfBlocks):
    """Let the compiler choose what it recomputes of each compiled block.

    Acts on compiled blocks alone, by way of the compiler that `apply_compile` gives them; the process's own
    settings stay as they are.
    """

    budget: float = 0.5
    """0 recomputes everything in the compiled region, 1 what the compiler would anyway."""

    pareto_folder: str | None = None
    """Draw time against memory for budgets from 0 to 1 into this folder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.budget <= 1:
            raise ParallelError(f"memory_budget = {self.budget}: a fraction from 0 to 1")

    def settings(self) -> dict[str, Any]:
        """Return the compiler's settings (of `torch._functorch.config`) for this budget."""
        drawing = {} if self.pareto_folder is None else {
            "visualize_memory_budget_pareto": True, "memory_budget_pareto_dir": self.pareto_folder
        }  # fmt: skip
        return {"activation_memory_budget": self.budget, **drawing}

    def _wrap(self, model: nn.Module, name: str) -> None:
        if self.pareto_folder is not None:
            Path(self.pareto_folder).mkdir(parents=True, exist_ok=True)
        model.get_submodule(name).__dict__[_BUDGET] = self

    def _nothing(self, lists: list[tuple[str, ...]]) -> str:
        return "its lists of blocks are empty"


def apply_activation_checkpointing(model: nn.Module, ac_config: Any, dump_folder: str) -> None:
    """Apply the policy that `ac_config` builds to the blocks of `model`, in place.

    Args:
        model: the model.
        ac_config: a policy of this file, or a torchtitan ActivationCheckpointing.Config, whose policies treat
            the children of `layers`.
        dump_folder: folder for what a policy writes.
    """
    policy: Policy = ac_config.build(dump_folder=dump_folder)
    policy.apply(model if isinstance(policy, _OfBlocks) else _Blocks(model))


def memory_budget(block: nn.Module) -> MemoryBudget | None:
    """Return the budget that was applied to `block`, for the compiler."""
    return block.__dict__.get(_BUDGET)


def _refuse_second_policy(model: nn.Module, lists: list[tuple[str, ...]]) -> None:
    for module in (
        inner for names in lists for name in names for inner in model.get_submodule(name).modules()
    ):
        if isinstance(module, ActivationWrapper) or memory_budget(module) is not None:
            raise ParallelError(
                f"{type(model).__name__} is checkpointed already: one policy, applied once; build the model again"
            )
    # transformers' own; its name until 5.
    name = "is_activation_checkpointing"
    if getattr(model, name if hasattr(model, name) else "is_gradient_checkpointing", False):
        raise ParallelError(
            f"{type(model).__name__} recomputes its blocks itself: call gradient_checkpointing_disable() before "
            "another policy"
        )


def replace(model: nn.Module, name: str, wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """Put `wrapper(module)` in the place of the module called `name`."""
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).register_module(child, wrapper(model.get_submodule(name)))


class _Blocks(nn.Module):
    """The blocks of any decoder under the name that torchtitan's policies look for."""

    def __init__(self, model: nn.Module):
        super().__init__()
        first = find_decoder(model).names[0]
        self.layers = model.get_submodule(first.rpartition(".")[0])
