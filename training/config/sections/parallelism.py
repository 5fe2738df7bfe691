"""How the model is spread, recomputed and compiled: [parallelism], [activation_checkpoint], [compile]."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from training.config.values import Fraction, PositiveInt, PositiveOrAuto, Rule

LayerOrOp = Annotated[
    str, Rule('"op", or a number of layers such as "2"', lambda value: value == "op" or _counts(value))
]


def _counts(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= 1


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Degrees: their product is the number of processes."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the weights (DDP; with a shard degree above 1, HSDP)."""

    data_parallel_shard_degree: PositiveOrAuto = -1
    """Processes over which each copy of the weights is sharded (FSDP); -1: all that the other degrees leave."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether FSDP frees the gathered weights between forward and backward."""

    enable_fsdp_symm_mem: bool = False
    """Let FSDP communicate through symmetric memory (CUDA, compute capability 9.0 or newer)."""

    tensor_parallel_degree: PositiveInt = 1
    """Processes over which each layer is split by its plan."""

    enable_sequence_parallel: bool = True
    """Under tensor parallelism: shard the sequence between the split regions."""

    disable_loss_parallel: bool = False
    """Under tensor parallelism: gather the logits, instead of leaving them sharded over the vocabulary."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the matrix products (CUDA, compiled model, sequence parallel)."""

    pipeline_parallel_degree: PositiveInt = 1
    """Processes over which the layers are spread; 1 is what works today."""

    context_parallel_degree: PositiveInt = 1
    """Processes over which the mixers' sequence is spread; 1 is what works today."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Activations that are computed again in the backward pass, instead of kept."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """Every layer (full), some (selective), as many as the compiler needs (memory_budget), or none."""

    selective_ac_option: LayerOrOp = "2"
    """Under selective: "n" recomputes every n-th layer whole; "op" keeps the costly operations of every layer."""

    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(default_factory=list)
    """Under "op": parts of Linear modules' names; products of their shapes are always recomputed."""

    memory_budget: Fraction = 0.5
    """Under memory_budget: 0 recomputes everything in the compiled region, 1 what the compiler would anyway."""

    visualize_memory_budget_pareto: bool = False
    """Under memory_budget: draw time against memory for budgets from 0 to 1, into dump_folder/memory_budget_pareto."""

    preserve_rng_state: bool = True
    """Restore the random state for the recomputation, so that dropout drops the same."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and types of what is recomputed with what was first computed, or don't."""

    debug: bool = False
    """Record what is recomputed, for a mismatch's error message; slow."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components."""

    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled: each layer of the model, the loss, or both."""

    backend: str = "inductor"
    """torch.compile's backend."""
