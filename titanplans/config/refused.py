"""Keys that other releases know and that are not honoured here: why, and what to do instead.

Such a key may stand in a job with the value that asks for nothing (`off`), which is mostly its old
default, so that a job written for torchtitan or flame need not be cleaned of what it does not use.
"""

from typing import Any, NamedTuple


class Refused(NamedTuple):
    """Why a key is refused, what to do instead, and the values that are accepted since they ask for nothing."""

    off: tuple[Any, ...]
    reason: str


def _refused(reason: str, section: str, off: dict[str, Any]) -> dict[str, Refused]:
    """Return one refusal for several keys of a section; None as `off` means that no value of it is accepted."""
    return {
        f"{section}.{key}": Refused(() if value is None else (value,), reason) for key, value in off.items()
    }


_PIPELINE = (
    "pipeline parallelism needs a split of the model into stages, which is not made here; "
    "tensor_parallel_degree, data_parallel_shard_degree and data_parallel_replicate_degree work"
)
_CONTEXT = (
    "context parallelism needs mixers that hand their state from one rank to the next, which the models here do not; "
    "tensor_parallel_degree with enable_sequence_parallel shards the sequence between the mixers"
)
_EXPERT = "no model here has experts, so there is nothing to split; leave it out"
_MX = 'no plan here is proved under MX formats; training.mixed_precision_param = "bfloat16" works'
_FT = (
    "torchft replicas have no counterpart in torchtitan 0.3's Trainer; "
    "[checkpoint] enable = true, with torchrun --max-restarts, resumes from the newest checkpoint"
)
_HF = (
    "Hugging Face safetensors need a state-dict adapter, which the models here do not have; "
    "distributed checkpoints (step-N folders) work"
)
_DATA = "only one source is read: name it in training.dataset, or download it and give training.dataset_path"

REFUSED: dict[str, Refused] = {
    "job.config_file": Refused((), "a job file can't name another; give its path on the command line"),
    "job.custom_config_module": Refused(
        ("",), "sections can't be added; code of your own is imported by experimental.custom_import"
    ),
    "job.use_for_integration_test": Refused((False,), "there is no such suite here; leave it out"),
    "model.converters": Refused(
        ([],),
        'only ["quantize.linear.float8"] is read, as quantize.linear.float8.recipe_name = "tensorwise" where that is unset',
    ),
    "model.print_after_conversion": Refused(
        (False,), "dump_folder/parallelism.json says which modules are float8; leave it out"
    ),
    "optimizer.early_step_in_backward": Refused(
        (False,), "gradients are clipped, which needs all of them before the first step; leave it out"
    ),
    "activation_offload.mode": Refused(
        ("none",), 'activations are not offloaded; activation_checkpoint.mode = "full" saves the most memory'
    ),
    "comm.mode": Refused(
        ("default",), "training needs real communication; torchrun --nproc-per-node 2 works on a CPU, too"
    ),
    "debug.moe_force_load_balance": Refused((False,), _EXPERT),
    "checkpoint.enable_ft_dataloader_checkpoints": Refused((True,), _FT),
    "checkpoint.interval_type": Refused(
        ("steps",), "flame reads it nowhere; checkpoint.interval counts steps, so leave it out"
    ),
    "checkpoint.model_weights_only": Refused(
        (False,), "flame reads it nowhere; checkpoint.last_save_model_only is the key that works"
    ),
    **_refused(_HF, "checkpoint", {"initial_load_in_hf": False, "last_save_in_hf": False}),
    "checkpoint.initial_load_in_hf_quantized": Refused((False,), _HF),
    **_refused(
        _PIPELINE,
        "parallelism",
        {
            "pipeline_parallel_degree": 1,
            "pipeline_parallel_first_stage_less_layers": 1,
            "pipeline_parallel_last_stage_less_layers": 1,
            "pipeline_parallel_layers_per_stage": None,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": "",
            "pipeline_parallel_microbatch_size": 1,
            "pipeline_parallel_expert_parallel_overlap": True,
            "pipeline_parallel_split_points": [],
            "module_fqns_per_model_part": None,
        },
    ),
    **_refused(
        _CONTEXT,
        "parallelism",
        {
            "context_parallel_degree": 1,
            "context_parallel_load_balancer": "headtail",
            "context_parallel_rotate_method": "allgather",
        },
    ),
    **_refused(
        _EXPERT,
        "parallelism",
        {
            "expert_parallel_degree": 1,
            "expert_tensor_parallel_degree": 1,
            "expert_parallel_comm_backend": "standard",
        },
    ),
    "parallelism.enable_compiled_autograd": Refused(
        (False,), "torchtitan dropped it; compile.enable compiles the backward, too"
    ),
    "parallelism.spmd_backend": Refused(
        ("partial_dtensor",), "only partial_dtensor takes models that are not torchtitan's own; leave it out"
    ),
    "training.disable_cuda_graphs": Refused(
        (True,), "CUDA graphs are never captured; compile.enable is the faster path that works"
    ),
    "float8.force_recompute_fp8_weight_in_bwd": Refused(
        (False,), "torchao dropped it: weights are always cast again in the backward; leave it out"
    ),
    "float8.enable_float8_linear": Refused(
        (False,), 'quantize.linear.float8.recipe_name = "tensorwise" switches float8 on'
    ),
    **_refused(
        _MX,
        "quantize.linear.mx",
        {
            "mxfp8_dim1_cast_kernel_choice": "triton",
            "recipe_name": "mxfp8_cublas",
            "filter_fqns": ["output"],
        },
    ),
    **_refused(_EXPERT, "quantize.grouped_mm.float8", {"fqns": []}),
    **_refused(_EXPERT, "quantize.grouped_mm.mx", {"recipe_name": "mxfp8", "fqns": []}),
    **_refused(
        "torchtitan deleted its memory estimation; profiling.enable_memory_snapshot shows the memory of a real run",
        "memory_estimation",
        {"enable": False, "enabled": False, "disable_fake_mode": False},
    ),
    **_refused(
        _FT,
        "fault_tolerance",
        {
            "enable": False,
            "process_group": "gloo",
            "process_group_timeout_ms": 10000,
            "replica_id": 0,
            "group_size": 0,
            "min_replica_size": 1,
            "semi_sync_method": None,
        },
    ),
    "experimental.custom_args_module": Refused(
        ("",), "sections can't be added; code of your own is imported by experimental.custom_import"
    ),
    "experimental.custom_model_path": Refused(
        ("",), "put the folder on PYTHONPATH and name the module in experimental.custom_import"
    ),
    **_refused(
        _PIPELINE,
        "experimental",
        {
            "pipeline_parallel_degree": 1,
            "pipeline_parallel_split_points": [],
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": "",
            "pipeline_parallel_microbatches": None,
        },
    ),
    **_refused(
        _CONTEXT,
        "experimental",
        {"context_parallel_degree": 1, "context_parallel_rotate_method": "allgather"},
    ),
    "experimental.enable_compiled_autograd": Refused(
        (False,), "torchtitan dropped it; compile.enable compiles the backward, too"
    ),
    "training.varlen": Refused(
        (False,), "document boundaries are not handed to the mixers; documents are packed into seq_len tokens"
    ),
    "training.streaming": Refused(
        (True,), "a data set by name is always streamed; download it and give training.dataset_path"
    ),
    **_refused(_DATA, "training", {"data_dir": "", "data_probs": ""}),
}
"""Refusals by key."""
