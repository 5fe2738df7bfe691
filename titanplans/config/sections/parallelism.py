"""The sections [parallelism], [ddp], [activation_checkpoint] and [compile].

A group of options here can be part of both a section and a strategy (`titanplans.config.strategies`).
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
"""float16 is left out: its gradients underflow without a gradient scaler, and no training loop here has one."""

LayerOrOp = Annotated[
    str, Constraint('"op", or a number of layers such as "2"', lambda value: value == "op" or _counts(value))
]


def _counts(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) >= 1


class ParallelDegrees(Options):
    """Number of ranks along each mesh dimension; the product is the number of processes."""

    data_parallel_strategy: Literal["fsdp2", "ddp", "megatron_fsdp"] = "fsdp2"
    """"fsdp2" shards parameters, also under tensor parallelism; "ddp" keeps a full model in each process;
    "megatron_fsdp" works only in a training loop of your own."""

    data_parallel_replicate_degree: PositiveInt = 1
    """Replicas of the model, each with different data (HSDP, if the shard degree is above 1); under ddp the number of
    processes."""

    data_parallel_shard_degree: PositiveOrAuto = -1
    """Ranks over which FSDP shards each replica, each with different data; -1: all ranks that the other degrees leave, or
    1 under ddp."""

    tensor_parallel_degree: PositiveInt = 1
    """Ranks over which each layer is split by its plan."""

    pipeline_parallel_degree: PositiveInt = 1
    """Pipeline stages: ranks over which the layers are distributed."""

    context_parallel_degree: PositiveInt = 1
    """Ranks over which each sequence is sharded; inside a token mixer, each rank has all tokens of some of the heads."""

    expert_parallel_degree: PositiveInt = 1
    """Ranks that experts are distributed over, taken from the other dimensions. 1: no expert parallelism; tensor
    parallelism splits each expert's width instead."""

    @property
    def shard_degree(self) -> int:
        """Ranks over which FSDP shards each replica, or -1 for all ranks that the other degrees leave; under ddp -1
        becomes 1."""
        unset = self.data_parallel_shard_degree == -1
        return 1 if unset and self.data_parallel_strategy == "ddp" else self.data_parallel_shard_degree


class TensorParallel(Options):
    """How a plan splits a layer; the degree is in `ParallelDegrees`."""

    enable_sequence_parallel: bool = True
    """Under tensor parallelism: shard hidden states along the sequence outside of the mixers and MLPs; false: replicate
    them."""

    disable_loss_parallel: bool = False
    """Under tensor parallelism: gather the logits for the loss; false: compute it from logits that are sharded over the
    vocabulary."""

    expert_capacity_factor: PositiveFloat | None = None
    """Under expert parallelism: an expert takes from each rank at most this factor times the mean number of tokens per
    expert. Of the rank's tokens for this expert, those above this limit, the last ones in the batch, skip the expert.
    Unset: no token skips an expert."""

    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with the matrix products (CUDA, compiled model, sequence parallel)."""

    async_tensor_parallel_unfused: Literal["error", "warn"] = "error"
    """Under enable_async_tensor_parallel: if nothing was overlapped in the first step, end the job ("error") or log it
    ("warn")."""


class PipelineParallel(Options):
    """How a model is split into stages, and the schedule of their computations; the degree is in `ParallelDegrees`."""

    pipeline_parallel_schedule: Literal[
        "GPipe",
        "1F1B",
        "LoopedBFS",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
    ] = "1F1B"
    """Pipeline schedule, with torch's name; all but GPipe and 1F1B have several stages per rank."""

    pipeline_parallel_microbatch_size: PositiveInt = 1
    """Sequences in a micro batch; training.local_batch_size must be a multiple of this number."""

    pipeline_parallel_layers_per_stage: PositiveInt | None = None
    """Layers per stage, which determines the number of stages; unset: one stage per rank, or two under schedules with
    several stages per rank."""

    pipeline_parallel_split_points: tuple[Name, ...] = ()
    """Names of the layers at which the second and later stages begin, such as model.layers.8; empty: stages of equal
    cost."""


class FSDP2(Options):
    """When FSDP2 gathers weights and reduces gradients."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] | PositiveInt = "default"
    """Weights that FSDP2 frees between forward and backward: all weights except those that the backward needs first
    ("default"), all ("always"), or none ("never"). A number n frees the same weights as "default", but reshards them over
    only n ranks. With a pipeline, "default" frees none."""

    fsdp_forward_prefetch: NaturalInt = 0
    """FSDP modules that are gathered ahead in the forward; 0: none."""

    fsdp_backward_prefetch: NaturalInt = 0
    """FSDP modules that are gathered ahead in the backward; 0: torch's default, one module."""

    fsdp_towers: Literal["blocks", "root"] = "blocks"
    """Whether each block of a vision tower is an FSDP module ("blocks"), or the tower belongs to the root module ("root").
    "root" is needed if some ranks' batches have images and others' have none."""

    fsdp_defer_grad_sync: Literal["all", "replicas", "nothing"] = "nothing"
    """Gradient reductions that are deferred to the last accumulated batch. "all": each rank then holds full gradients;
    "replicas": under HSDP, the reductions over replicas; "nothing": each batch reduces its gradients."""

    fsdp_keep_gathered: bool = False
    """Keep weights gathered from one accumulated batch to the next; each rank then holds full weights."""

    enable_fsdp_symm_mem: bool = False
    """Let FSDP communicate through symmetric memory (CUDA, compute capability 9.0 or newer)."""


class Parallelism(FSDP2, PipelineParallel, TensorParallel, ParallelDegrees, section="parallelism"):
    """[parallelism]: the degrees, tensor parallelism, pipelines and FSDP2."""


class MixedPrecision(Options):
    """Types in which FSDP2 computes and communicates; parameters and optimizer states are kept in training.dtype."""

    mixed_precision_param: Dtype | None = None
    """Type in which layers compute: FSDP2's mixed precision or, under ddp, autocast; unset: training.dtype."""

    mixed_precision_reduce: Dtype | None = None
    """Type in which FSDP2 sums gradients over ranks; unset: the type in which layers compute."""

    mixed_precision_output: Dtype | None = None
    """Type to which FSDP2 casts the logits; unset: the type in which they were computed."""

    mixed_precision_cast_inputs: bool = False
    """Let FSDP2 cast each layer's floating-point inputs, such as images, to mixed_precision_param."""


class Offload(Options):
    """What FSDP2 keeps in CPU memory."""

    enable_cpu_offload: bool = False
    """Under FSDP2: keep parameters, gradients and optimizer states in CPU memory between uses."""

    pin_cpu_memory: bool | None = None
    """Under enable_cpu_offload: use page-locked memory; unset: true if there is an accelerator."""


class Autocast(Options):
    """torch.autocast around the forward."""

    autocast_dtype: Dtype | None = None
    """Type of torch.autocast, which casts operator by operator; unset: no autocast, except under ddp, which uses
    mixed_precision_param."""


class DDP(Options, section="ddp"):
    """Under parallelism.data_parallel_strategy = "ddp": each rank has the full model, and gradients are summed over the
    ranks."""

    bucket_cap_mb: PositiveFloat | None = None
    """Size in MiB of a bucket, the gradients that are summed in one all-reduce; unset: torch's 25, and 1 for the first
    bucket."""

    find_unused_parameters: bool = False
    """Find in each forward the parameters that the loss does not depend on; otherwise DDP waits for their gradients."""

    static_graph: bool = False
    """Promise that every step uses the same parameters equally often; DDP records this in the first step. Needs
    defer_grad_sync = false."""

    gradient_as_bucket_view: bool = False
    """Make gradients views of the buckets, which saves a copy."""

    broadcast_buffers: bool = False
    """Broadcast rank 0's buffers before each forward in training; false: only at the start."""

    defer_grad_sync: bool = True
    """Sum gradients over ranks once per step, in the backward of the last accumulated batch; false: in every backward."""

    split_compiled_blocks: bool = False
    """Split a compiled block's graph at the ends of buckets, so that a block larger than a bucket does not delay the
    sums."""


class ActivationCheckpoint(
    Options,
    section="activation_checkpoint",
    of_bool={True: {"mode": "full"}, False: {"mode": "none"}},
    refuses=groups.activation_checkpoint,
):
    """Activations that are recomputed in the backward instead of kept."""

    mode: Literal["selective", "full", "mlp", "keep_mixer", "memory_budget", "none"] = "none"
    """What is recomputed in the backward: every layer ("full"), some layers or operations ("selective"), each layer's MLP
    ("mlp"), everything except the token mixers ("keep_mixer"), operations that the compiler chooses ("memory_budget"), or
    nothing ("none")."""

    scope: Literal["all", "language", "vision"] = "all"
    """Layers whose activations are recomputed: the decoder's layers ("language"), the layers of vision towers ("vision"),
    or "all"."""

    selective_ac_option: LayerOrOp = "2"
    """Under mode = "selective": a number n recomputes every n-th layer; "op" keeps the costly operations of every layer
    and recomputes the others."""

    per_op_sac_matmuls: Literal["all", "every second", "none"] = "every second"
    """Under selective_ac_option = "op": which matrix products of activations and weights are kept."""

    per_op_sac_keep_attention: bool = True
    """Under selective_ac_option = "op": keep the results of fused attention."""

    per_op_sac_keep_collectives: bool = True
    """Under selective_ac_option = "op": keep the results of collectives."""

    per_op_sac_keep_operators: Strings = ()
    """Under selective_ac_option = "op": further operators whose results are kept, with torch.library's names,
    "namespace::name"."""

    per_op_sac_force_recompute_mm_shapes_by_fqns: Strings = ()
    """Under selective_ac_option = "op": recompute the matrix products of each Linear whose name contains one of these
    strings, and all matrix products with a weight of the same shape as one of theirs."""

    memory_budget: Fraction = 0.5
    """Under mode = "memory_budget": fraction of the activation memory that may be kept. 0: a compiled region keeps
    nothing and recomputes everything; 1: it recomputes only what the compiler recomputes without a budget."""

    visualize_memory_budget_pareto: bool = False
    """Under mode = "memory_budget": plot time against memory for budgets from 0 to 1, into
    dump_folder/memory_budget_pareto."""

    preserve_rng_state: bool = True
    """Restore the random state for the recomputation, so that dropout drops the same values."""

    determinism_check: Literal["default", "none"] = "default"
    """Compare shapes and types of recomputed tensors with the tensors of the forward ("default"), or skip this check
    ("none")."""

    early_stop: bool = False
    """Stop a recomputation at the last tensor that the backward needs."""

    debug: bool = False
    """Record the recomputed operators, so that the error message of a mismatch names them; slow."""


class Compile(
    Options, section="compile", of_bool={True: {"enable": True}, False: {}}, refuses=groups.compiled
):
    """torch.compile."""

    enable: bool = False
    """Compile the components with torch.compile; false: the other keys of this section do nothing."""

    components: tuple[Literal["model", "loss", "optimizer"], ...] = ("model", "loss")
    """What is compiled: each layer of the model, the loss, the optimizer's step (unless its implementation is fused)."""

    backend: Name = "inductor"
    """torch.compile's backend."""

    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Inductor's preset of options; unset: its default."""

    fullgraph: bool | None = None
    """Whether each component must compile to one graph; unset: layers must, except FLA's layers, layers under context or
    expert parallelism, and layers of a model with output_router_logits."""

    dynamic: bool | None = None
    """Compile once for all sizes (true) or once for each size (false); unset: first for one size, and again for all sizes
    when a size changes."""

    options: dict[str, bool | int | float | str] | None = None
    """Inductor's settings by name, instead of mode."""

    @property
    def blocks(self) -> bool:
        """Whether the blocks of the model are compiled."""
        return self.enable and "model" in self.components
