"""Options that are read under another name today: torchtitan's earlier ones and 0.3's, flame's, and Automodel's.

Only names stand here; what can't be honoured under any name is in `refused`.
"""

from typing import NamedTuple


class Renamed(NamedTuple):
    """Today's key, and whose name the old one is."""

    to: str
    of: str


def _renamed(of: str, names: dict[str, str]) -> dict[str, Renamed]:
    return {old: Renamed(new, of) for old, new in names.items()}


RENAMED: dict[str, Renamed] = {
    **_renamed(
        "torchtitan up to 0.2.2",
        {
            "model.tokenizer_path": "model.hf_assets_path",
            "job.print_args": "job.print_config",
            "checkpoint.enable_checkpoint": "checkpoint.enable",
            "checkpoint.initial_load_model_weights_only": "checkpoint.initial_load_model_only",
            "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
            "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
            "training.compile": "compile.enable",
            "training.seed": "debug.seed",
            "training.deterministic": "debug.deterministic",
            "experimental.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
            **{
                f"float8.{key}": f"quantize.linear.float8.{key}"
                for key in (
                    "enable_fsdp_float8_all_gather",
                    "precompute_float8_dynamic_scale_for_fsdp",
                    "recipe_name",
                    "filter_fqns",
                    "emulate",
                )
            },
        },
    ),
    **_renamed(
        "flame",
        {
            "training.batch_size": "training.local_batch_size",
            "training.data_files": "training.dataset_path",
            "training.num_workers": "training.dataloader.num_workers",
            "training.persistent_workers": "training.dataloader.persistent_workers",
            "training.pin_memory": "training.dataloader.pin_memory",
            "training.prefetch_factor": "training.dataloader.prefetch_factor",
            "training.data_parallel_replicate_degree": "parallelism.data_parallel_replicate_degree",
            "training.data_parallel_shard_degree": "parallelism.data_parallel_shard_degree",
            "training.tensor_parallel_degree": "parallelism.tensor_parallel_degree",
            "training.disable_loss_parallel": "parallelism.disable_loss_parallel",
            "training.fsdp_reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
        },
    ),
    **_renamed(
        "torchtitan 0.3",
        {
            "compile.enable_async_tensor_parallel": "parallelism.enable_async_tensor_parallel",
            "debug.print_config": "job.print_config",
            "debug.save_config_file": "job.save_config_file",
        },
    ),
}
"""Today's key by the old one."""

AUTOMODEL: dict[str, str] = {
    "sequence_parallel": "enable_sequence_parallel",
    "tp_plan": "plan",
    "activation_checkpointing": "activation_checkpoint",
    "defer_fsdp_grad_sync": "fsdp_defer_grad_sync",
    "reshard_after_forward": "fsdp_reshard_after_forward",
    "fsdp2_forward_prefetch_depth": "fsdp_forward_prefetch",
    "fsdp2_backward_prefetch_depth": "fsdp_backward_prefetch",
    "enabled": "enable",
    "megatron_fsdp_unit_modules": "fsdp_unit_modules",
}
"""Today's option of a strategy by that of NeMo Automodel's configs."""
