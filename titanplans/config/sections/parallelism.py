"""How a model is spread, recomputed and compiled: [parallelism], [ddp], [activation_checkpoint], [compile].

Options that a strategy of `strategies` shares with a section are a group here, from which both are made.
"""

from typing import Annotated, Literal

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import (
    Constraint,
    Fraction,
    Name,
    NaturalInt,
    PositiveFloat,
    PositiveInt,
    PositiveOrAuto,
    Strings,
)

Dtype = Literal["bfloat16", "float32"]
"""float16 is not among them: its gradients underflow without a scaler, and no loop here has one."""

LayerOrOp = Annotated[
    str, Constraint('"op", or a number of layers such as "2"', lambda value: value == "op" or _counts(value))
]


def _counts(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1


class ParallelDegrees(Options):
    """How many processes to each axis; their product is the number of processes."""

    data_parallel_strategy: Literal["fsdp2", "ddp", "megatron_fsdp"] = "fsdp2"
    """FSDP2, also with tensor parallelism; or DDP, a whole model a process. megatron_fsdp: in a loop of your own only."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Copies of the weights (with a shard degree above 1, HSDP); under ddp the number of processes."""

    data_parallel_shard_degree: PositiveOrAuto = -1
    """Processes over which each copy of the weights is sharded; -1: all that the other degrees leave, under ddp 1."""

    tensor_parallel_degree: PositiveInt = 1
    """Processes over which each layer is split by its plan."""

    pipeline_parallel_degree: PositiveInt = 1
    """Processes over which the layers are spread, in stages."""

    context_parallel_degree: PositiveInt = 1
    """Processes that share each sequence: each has a part of its tokens, in a mixer all tokens of a part of its heads."""

    expert_parallel_degree: PositiveInt = 1
    """Processes, among those of the other degrees, that share the experts, each holding some of them whole; 1: those of a
    layer share each expert's width."""

    @property
    def shard_degree(self) -> int:
        """Processes over which each copy of the weights is sharded; -1: all that the other degrees leave."""
        unset = self.data_parallel_shard_degree == -1
        return 1 if unset and self.data_parallel_strategy == "ddp" else self.data_parallel_shard_degree


class TensorParallel(Options):
    """How a plan splits a layer; the degree is in `ParallelDegrees`."""

    enable_sequence_parallel: bool = True
    """Under tensor parallelism: shard the sequence between the split regions."""

    disable_loss_parallel: bool = False
    """Under tensor parallelism: gather the logits, instead of leaving them sharded over the vocabulary."""

    expert_capacity_factor: PositiveFloat | None = None
    """Under expert parallelism: an expert takes at most this many times the mean of the rows that a process sends, and drops
    the last ones; unset: none is dropped."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the matrix products (CUDA, compiled model, sequence parallel)."""

    async_tensor_parallel_unfused: Literal["error", "warn"] = "error"
    """Under enable_async_tensor_parallel, what follows where none of it was overlapped in the first step."""


class PipelineParallel(Options):
    """How a model is cut into stages, and in which order they compute; the degree is in `ParallelDegrees`."""

    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    """Order in which stages compute, by torch's names; those from LoopedBFS on have several stages a process."""

    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences in a micro batch; training.local_batch_size is a multiple of it."""

    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Layers in a stage, which sets the number of stages; unset: one a process, two under schedules that have several."""

    pipeline_parallel_split_points: tuple[Name, ...] = ()
    """Names of the layers at which the second and later stages begin, such as model.layers.8; empty: stages of even cost."""


class FSDP2(Options):
    """FSDP2's gathers and sums."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] | PositiveInt = "default"
    """What FSDP2 frees between forward and backward: all but what the backward needs first (default), every unit
    (always), none (never), or as default but to shards over that many processes (a number). A pipeline's default: none."""

    fsdp_forward_prefetch: NaturalInt = 0
    """Units that FSDP2 gathers ahead in the forward."""

    fsdp_backward_prefetch: NaturalInt = 0
    """Units that FSDP2 gathers ahead in the backward; 0: torch's own rule, which is one."""

    fsdp_towers: Literal["units", "root"] = "units"
    """Whether FSDP2 takes each block of a vision tower as a unit, or the tower as part of the root: for forwards in which
    some processes have images and others none."""

    fsdp_defer_grad_sync: Literal["all", "replicas", "nothing"] = "nothing"
    """Over accumulated batches, what waits for the last: nothing; under HSDP the sum over the copies (replicas); or every
    sum (all), for which each process holds a whole copy of the gradients."""

    fsdp_keep_gathered: bool = False
    """Keep weights gathered from one accumulated batch to the next, a whole copy of them a process."""

    enable_fsdp_symm_mem: bool = False
    """Let FSDP communicate through symmetric memory (CUDA, compute capability 9.0 or newer)."""


class Parallelism(FSDP2, PipelineParallel, TensorParallel, ParallelDegrees, section="parallelism"):
    """[parallelism]: the degrees, tensor parallelism, pipelines and FSDP2."""


class MixedPrecision(Options):
    """Types of FSDP2's compute and communication; parameters and optimizer states stay as they are kept."""

    mixed_precision_param: Dtype | None = None
    """Type in which layers compute, given by FSDP2's mixed precision, under ddp by autocast; unset: as kept."""

    mixed_precision_reduce: Dtype | None = None
    """Type in which FSDP2 sums gradients; unset: the type in which layers compute."""

    mixed_precision_output: Dtype | None = None
    """Type of the logits, given by FSDP2's mixed precision; unset: as computed."""

    mixed_precision_cast_inputs: bool = False
    """Let FSDP2 cast the floating-point inputs of each layer to mixed_precision_param: for images of another type."""


class Offload(Options):
    """What FSDP2 keeps in CPU memory."""

    enable_cpu_offload: bool = False
    """Under FSDP2: keep parameters, gradients and optimizer states in CPU memory between uses."""

    pin_cpu_memory: bool | None = None
    """Under enable_cpu_offload: page-locked memory; unset: if there is an accelerator."""


class Autocast(Options):
    """torch.autocast around the forward."""

    autocast_dtype: Dtype | None = None
    """Run the forward under torch.autocast, operator by operator; unset: not, but under ddp in mixed_precision_param."""


class DDP(Options, section="ddp"):
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


class ActivationCheckpoint(
    Options,
    section="activation_checkpoint",
    of_bool={True: {"mode": "full"}, False: {"mode": "none"}},
    refuses=groups.activation_checkpoint,
):
    """Activations that are computed again in the backward pass, instead of kept."""

    mode: Literal["selective", "full", "mlp", "keep_mixer", "memory_budget", "none"] = "none"
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

    per_op_sac_keep_operators: Strings = ()
    """Under "op": more operators to keep, "namespace::name" of torch.library."""

    per_op_sac_force_recompute_mm_shapes_by_fqns: Strings = ()
    """Under "op": parts of Linear modules' names; products of their shapes are always recomputed."""

    memory_budget: Fraction = 0.5
    """Under memory_budget: 0 recomputes everything in the compiled region, 1 what the compiler would anyway."""

    visualize_memory_budget_pareto: bool = False
    """Under memory_budget: draw time against memory for budgets from 0 to 1, into dump_folder/memory_budget_pareto."""

    preserve_rng_state: bool = True
    """Restore the random state for the recomputation, so that dropout drops the same."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and types of recomputed tensors with those of the forward, or don't."""

    early_stop: bool = False
    """End a recomputation at the last tensor that the backward needs."""

    debug: bool = False
    """Record recomputed operators, for a mismatch's error message; slow."""


class Compile(
    Options, section="compile", of_bool={True: {"enable": True}, False: {}}, refuses=groups.compiled
):
    """torch.compile."""

    enable: bool = False
    """Compile the components; without it the other keys of this section wait."""

    components: tuple[Literal["model", "loss", "optimizer"], ...] = ("model", "loss")
    """What is compiled: each layer of the model, the loss, the optimizer's step (not the fused implementations)."""

    backend: Name = "inductor"
    """torch.compile's backend."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Inductor's preset; unset: its default."""

    fullgraph: bool | None = None
    """Whether each component must be one graph; unset: layers must, but for FLA's and those with recorded routers."""

    dynamic: bool | None = None
    """Compile for any sizes (true) or for each (false); unset: for each, until one changes."""

    options: dict[str, bool | int | float | str] | None = None
    """Inductor's settings by name, instead of mode."""

    @property
    def blocks(self) -> bool:
        """Whether the blocks of the model are compiled."""
        return self.enable and "model" in self.components
