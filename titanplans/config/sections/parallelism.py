"""How the model is spread, recomputed and compiled: [parallelism], [ddp], [activation_checkpoint], [compile]."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titanplans.config.values import Fraction, NaturalInt, PositiveFloat, PositiveInt, PositiveOrAuto, Rule

LayerOrOp = Annotated[
    str, Rule('"op", or a number of layers such as "2"', lambda value: value == "op" or _counts(value))
]


def _counts(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) >= 1


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Degrees: their product is the number of processes."""

    data_parallel_strategy: Literal["fsdp2", "ddp", "megatron_fsdp"] = "fsdp2"
    """FSDP2, beside tensor parallelism; or DDP, a whole model a process. megatron_fsdp is for loops of one's own."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the weights (with a shard degree above 1, HSDP); under ddp the number of processes."""

    data_parallel_shard_degree: PositiveOrAuto = -1
    """Processes over which each copy of the weights is sharded; -1: all that the other degrees leave, under ddp 1."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] | PositiveInt = "default"
    """What FSDP2 frees between forward and backward: all but what the backward needs first (default), every unit
    (always), none (never), or as default but to shards over that many processes (a number)."""

    fsdp_forward_prefetch: NaturalInt = 0
    """Units that FSDP2 gathers ahead in the forward."""

    fsdp_backward_prefetch: NaturalInt = 0
    """Units that FSDP2 gathers ahead in the backward; 0: torch's own rule, which is one."""

    fsdp_towers: Literal["units", "root"] = "units"
    """Whether FSDP2 takes each block of a vision tower as a unit, or the tower as part of the root: for processes without
    images in a step."""

    fsdp_defer_grad_sync: Literal["all", "replicas", "nothing"] = "nothing"
    """Over accumulated batches, what waits for the last: nothing; under HSDP the sum over the copies (replicas); or every
    sum (all), for which each process holds a whole copy of the gradients."""

    fsdp_keep_gathered: bool = False
    """Keep weights gathered from one accumulated batch to the next, a whole copy of them a process."""

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

    async_tensor_parallel_unfused: Literal["error", "warn"] = "error"
    """Under enable_async_tensor_parallel, what follows where none of it was overlapped in the first step."""

    pipeline_parallel_degree: PositiveInt = 1
    """Processes over which the layers are spread; 1 is what works today."""

    context_parallel_degree: PositiveInt = 1
    """Processes over which the mixers' sequence is spread; 1 is what works today."""

    @property
    def shard_degree(self) -> int:
        """Processes over which each copy of the weights is sharded; -1: all that the other degrees leave."""
        unset = self.data_parallel_shard_degree == -1
        return 1 if unset and self.data_parallel_strategy == "ddp" else self.data_parallel_shard_degree


@dataclass(frozen=True, kw_only=True)
class DDP:
    """Under parallelism.data_parallel_strategy = "ddp": a whole model on each process, whose gradients are summed."""

    bucket_cap_mb: PositiveFloat | None = None
    """MiB of gradients that one all-reduce sums; unset: torch's 25, and 1 for the first."""

    find_unused_parameters: bool = False
    """Look in each forward for parameters that the outputs don't depend on, which would be waited for."""

    static_graph: bool = False
    """The same parameters are used in every step, and as often: learnt in the first. Needs defer_grad_sync = false."""

    gradient_as_bucket_view: bool = False
    """Gradients are views of the buckets, which saves a copy of them."""

    broadcast_buffers: bool = False
    """Give buffers rank 0's values before each forward in training, not only at the start."""

    defer_grad_sync: bool = True
    """Over accumulated batches, sum gradients once, in the last one's backward."""

    split_compiled_blocks: bool = False
    """Cut a compiled block's graph where buckets end; for blocks larger than a bucket."""


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpoint:
    """Activations that are computed again in the backward pass, instead of kept."""

    mode: Literal["selective", "full", "mlp", "keep_mixer", "memory_budget", "none"] = "selective"
    """Every layer (full), some (selective), of each layer the MLP (mlp) or all but the token mixer (keep_mixer), as many as
    the compiler needs (memory_budget), or none."""

    scope: Literal["all", "language", "vision"] = "all"
    """Which layers: the decoder's (language), those of vision towers (vision), or all of them."""

    selective_ac_option: LayerOrOp = "2"
    """Under selective: "n" recomputes every n-th layer whole; "op" keeps the costly operations of every layer."""

    per_op_sac_matmuls: Literal["all", "every second", "none"] = "every second"
    """Under "op": which products of activations and weights are kept."""

    per_op_sac_keep_attention: bool = True
    """Under "op": keep what fused attention operators return."""

    per_op_sac_keep_collectives: bool = True
    """Under "op": keep what collectives return."""

    per_op_sac_keep_operators: list[str] = field(default_factory=list)
    """Under "op": more operators to keep, "namespace::name" of torch.library."""

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

    early_stop: bool = False
    """End a recomputation at the last tensor that the backward needs."""

    debug: bool = False
    """Record what is recomputed, for a mismatch's error message; slow."""


@dataclass(frozen=True, kw_only=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile the components; without it the other keys of this section wait."""

    components: list[Literal["model", "loss", "optimizer"]] = field(default_factory=lambda: ["model", "loss"])
    """What is compiled: each layer of the model, the loss, the optimizer's step (not the fused implementations)."""

    backend: str = "inductor"
    """torch.compile's backend."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Inductor's preset; unset: its default."""

    fullgraph: bool | None = None
    """Whether each component must be one graph; unset: layers must, but for those of FLA."""

    dynamic: bool | None = None
    """Compile for any sizes (true) or for each (false); unset: for each, until one changes."""

    options: dict[str, bool | int | float | str] | None = None
    """Inductor's settings by name, instead of mode."""
