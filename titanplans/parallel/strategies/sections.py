"""Groups of options that strategies share: mixed precision, activation checkpointing, compile."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

import torch

from titanplans.parallel.activation_checkpoint import EveryNthLayer, Full, MemoryBudget, MLPOnly, Policy
from titanplans.parallel.activation_checkpoint.keep_mixer import KeepMixer
from titanplans.parallel.activation_checkpoint.selective import Matmuls, Selective
from titanplans.parallel.blocks import Scope
from titanplans.parallel.compile import async_tp, compile_options
from titanplans.parallel.strategies.options import Options

Dtype = Literal["bfloat16", "float32"]
"""float16 is not among them: its gradients underflow without a scaler, and no loop here has one."""

Mode = Literal["none", "full", "selective", "every_nth", "mlp", "keep_mixer", "memory_budget"]
Value = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(Options):
    """Dtypes of FSDP2's compute and communication; parameters and optimizer states stay as they are stored."""

    title: ClassVar[str] = "mixed_precision"

    param_dtype: Dtype | None = None
    """Dtype of gathered parameters, and so of compute; unset: as stored."""

    reduce_dtype: Dtype | None = None
    """Dtype in which gradients are summed and, if the sum is deferred, accumulated; unset: param_dtype."""

    output_dtype: Dtype | None = None
    """Dtype of the floating-point tensors that the model returns; unset: as computed."""

    cast_forward_inputs: bool = False
    """Cast floating-point inputs of each unit to param_dtype: for images in another dtype."""

    def check(self) -> None:
        if self.cast_forward_inputs and self.param_dtype is None:
            raise self.refuse("cast_forward_inputs", "to which dtype? Set param_dtype, or leave this out")


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Options):
    """Activations that are computed again in the backward pass, instead of kept."""

    title: ClassVar[str] = "activation_checkpointing"

    mode: Mode = "none"
    """Nothing (none); every block whole (full); all but costly operators' outputs (selective); every n-th block
    whole (every_nth); the MLP of every block (mlp); all but the token mixer (keep_mixer); or what the
    compiler chooses within a budget (memory_budget)."""

    scope: Scope = "all"
    """Which lists of blocks: the decoder's (language), those of vision towers (vision), or all of them."""

    every_nth: int = 2
    """Under every_nth: blocks n-1, 2n-1, … of each list are recomputed."""

    matmuls: Matmuls = "every second"
    """Under selective: which products of activations and weights are kept."""

    attention: bool = True
    """Under selective: keep what fused attention operators return."""

    collectives: bool = True
    """Under selective: keep what collectives return."""

    operators: tuple[str, ...] = ()
    """Under selective: more operators to keep, "namespace::name"."""

    recompute_linears: tuple[str, ...] = ()
    """Under selective: parts of Linear modules' names whose products are always recomputed."""

    memory_budget: float = 0.5
    """Under memory_budget: 0 recomputes everything in a compiled block, 1 what the compiler would anyway."""

    pareto_folder: str | None = None
    """Under memory_budget: draw time against memory for budgets from 0 to 1 into this folder."""

    preserve_rng_state: bool = True
    """Restore the random state for the recomputation, so that dropout drops the same."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and types of what is recomputed with what was first computed, or don't."""

    early_stop: bool = False
    """End a recomputation at the last tensor that the backward needs."""

    debug: bool = False
    """Record what is recomputed, for a mismatch's error message; slow."""

    def check(self) -> None:
        read = {"mode", *_READ[self.mode]}
        for item in fields(self):
            if item.name not in read and getattr(self, item.name) != item.default:
                modes = [mode for mode, names in _READ.items() if item.name in names]
                raise self.refuse(
                    item.name,
                    f'mode = "{self.mode}" does not read it: leave it out, or take {", ".join(modes)}',
                )
        if self.every_nth < 1:
            raise self.refuse("every_nth", "every how many blocks? A whole number from 1 up")
        self.policy()  # refuses the rest

    def policy(self) -> Policy | None:
        """Return what recomputes, for `activation_checkpoint.apply_activation_checkpointing`; None for nothing."""
        if self.mode == "none":
            return None
        kind, given = _POLICIES[self.mode], {name: getattr(self, name) for name in _READ[self.mode]}
        for ours, theirs in (("every_nth", "n"), ("memory_budget", "budget")):
            if ours in given:
                given[theirs] = given.pop(ours)
        return kind(**given)


_POLICIES = {
    "full": Full,
    "selective": Selective,
    "every_nth": EveryNthLayer,
    "mlp": MLPOnly,
    "keep_mixer": KeepMixer,
    "memory_budget": MemoryBudget,
}
_EACH = ("scope", "preserve_rng_state", "determinism_check", "early_stop", "debug")
_READ: dict[str, tuple[str, ...]] = {
    "none": (),
    "full": _EACH,
    "selective": (*_EACH, "matmuls", "attention", "collectives", "operators", "recompute_linears"),
    "every_nth": (*_EACH, "every_nth"),
    "mlp": _EACH,
    "keep_mixer": _EACH,
    "memory_budget": ("scope", "memory_budget", "pareto_folder"),
}
"""The options that each mode reads."""


@dataclass(frozen=True, kw_only=True)
class Compile(Options):
    """torch.compile; read by `titanplans.parallel.compile`."""

    title: ClassVar[str] = "compile"

    enable: bool = False
    """Compile the components."""

    components: tuple[Literal["model", "loss", "optimizer"], ...] = ("model", "loss")
    """What is compiled: each block of the model, the loss, the optimizer's step."""

    backend: str = "inductor"
    """torch.compile's backend."""

    mode: str | None = None
    """Inductor's preset, such as "max-autotune"; unset: its default."""

    fullgraph: bool | None = None
    """A block must be one graph; unset: it must unless it holds modules of flash-linear-attention."""

    dynamic: bool | None = None
    """Compile for any sizes (true) or for each (false); unset: for each, until one changes."""

    options: dict[str, Value] | None = None
    """Inductor's settings by name."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the matrix products (CUDA with NCCL, sequence parallel)."""

    async_tensor_parallel_unfused: async_tp.Unfused = "error"
    """What follows where, after the first step, none of it was: an error, or a warning."""

    def check(self) -> None:
        if not self.components:
            raise self.refuse(
                "components", "compiles nothing: name model, loss or optimizer, or leave it out"
            )
        if len(set(self.components)) < len(self.components):
            raise self.refuse("components", "names one twice: once is enough")
        if not self.enable:
            for item in fields(self):
                if item.name not in ("enable", "components") and getattr(self, item.name) != item.default:
                    raise self.refuse(
                        item.name, "nothing is compiled: set compile.enable to true, or leave it out"
                    )
        if self.enable and self.fullgraph and "optimizer" in self.components:
            raise self.refuse(
                "fullgraph",
                'an optimizer\'s step is several graphs: leave fullgraph out, or "optimizer" out of components',
            )
        if self.enable_async_tensor_parallel:
            async_tp.refuse(blocks=self.blocks, backend=self.backend)
        elif self.async_tensor_parallel_unfused != "error":
            raise self.refuse(
                "async_tensor_parallel_unfused",
                "nothing is to be fused: set enable_async_tensor_parallel to true, or leave it out",
            )
        if self.enable:
            compile_options(self)

    @property
    def blocks(self) -> bool:
        """Whether the blocks of the model are compiled."""
        return self.enable and "model" in self.components


def dtype(name: Dtype | None) -> torch.dtype | None:
    """Return the dtype called `name`."""
    return None if name is None else getattr(torch, name)


def check_recomputation(checkpointing: ActivationCheckpointing, compile: Compile) -> None:
    """Refuse an activation checkpointing that compiled blocks exclude, or that needs them.

    Raises:
        ParallelError: naming the two options.
    """
    if checkpointing.mode == "memory_budget" and not compile.blocks:
        raise checkpointing.refuse(
            "mode",
            'the compiler chooses, and no block is compiled: set compile.enable to true with "model" in components',
        )
    if checkpointing.mode == "keep_mixer" and compile.blocks:
        raise checkpointing.refuse(
            "mode", "a kept mixer can't be in a compiled block: set compile.enable to false, or take mlp"
        )
