"""Keys of torchtitan up to 0.2.2 and of flame: each is accepted, renamed with a note, or refused with the reason."""

import pytest
import tomli_w

from tests.support.refusals import refusal
from titanplans.config import ConfigError, load_job
from titanplans.config.options import get
from titanplans.config.other_names import ELSEWHERE, REFUSED, RENAMED, REQUIRES_SWITCH
from titanplans.config.schema import keys
from titanplans.config.translate import PENDING

# Sections and keys of JobConfig in torchtitan 0.2.2.
TORCHTITAN = """
job: config_file dump_folder description print_config save_config_file custom_config_module
profiling: enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup enable_memory_snapshot
  save_memory_snapshot_folder
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
model: name flavor hf_assets_path tokenizer_path converters print_after_conversion
optimizer: name lr beta1 beta2 eps weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps total_steps decay_ratio decay_type min_lr_factor
training: dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload dtype
  mixed_precision_param mixed_precision_reduce gc_freq gc_debug
training.dataloader: num_workers persistent_workers pin_memory prefetch_factor
parallelism: data_parallel_replicate_degree data_parallel_shard_degree fsdp_reshard_after_forward
  tensor_parallel_degree disable_loss_parallel enable_async_tensor_parallel pipeline_parallel_degree
  pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
  pipeline_parallel_layers_per_stage pipeline_parallel_schedule pipeline_parallel_schedule_csv
  pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap module_fqns_per_model_part
  context_parallel_degree context_parallel_load_balancer context_parallel_rotate_method expert_parallel_degree
  expert_parallel_comm_backend expert_tensor_parallel_degree
checkpoint: enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only
  initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode
  keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only
activation_checkpoint: mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget
  visualize_memory_budget_pareto preserve_rng_state determinism_check debug
compile: enable components backend
quantize.linear.float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp recipe_name
  filter_fqns emulate
quantize.linear.mx: mxfp8_dim1_cast_kernel_choice recipe_name filter_fqns
quantize.grouped_mm.float8: fqns
quantize.grouped_mm.mx: recipe_name fqns
comm: init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode
memory_estimation: enable disable_fake_mode
fault_tolerance: enable process_group process_group_timeout_ms replica_id group_size min_replica_size semi_sync_method
experimental: custom_import custom_args_module
validation: enable dataset dataset_path local_batch_size seq_len freq steps
validation.dataloader: num_workers persistent_workers pin_memory prefetch_factor
debug: seed deterministic deterministic_warn_only moe_force_load_balance
"""

# Options of flame's config_manager.py and keys of its fla.toml (commit e11e7be).
FLAME = """
job: config_file dump_folder description use_for_integration_test print_args
model: name config tokenizer_path converters print_after_conversion
profiling: enable_profiling save_traces_folder profile_freq enable_memory_snapshot save_memory_snapshot_folder
optimizer: name eps lr beta1 beta2 weight_decay implementation early_step_in_backward
lr_scheduler: warmup_steps decay_ratio decay_type lr_min
training: batch_size seq_len context_len varlen gradient_accumulation_steps steps max_norm skip_nan_inf dataset
  dataset_name dataset_split data_dir data_files data_probs streaming num_workers pin_memory persistent_workers
  prefetch_factor data_parallel_replicate_degree data_parallel_shard_degree enable_cpu_offload tensor_parallel_degree
  disable_loss_parallel fsdp_reshard_after_forward mixed_precision_param mixed_precision_reduce compile gc_freq seed
  deterministic
metrics: log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb
experimental: enable_async_tensor_parallel pipeline_parallel_degree pipeline_parallel_split_points
  pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_microbatches enable_compiled_autograd
  context_parallel_degree context_parallel_rotate_method custom_model_path
checkpoint: enable_checkpoint folder initial_load_path initial_load_model_weights_only interval interval_type
  model_weights_only last_save_model_weights_only export_dtype create_seed_checkpoint async_mode keep_latest_k load_step
  exclude_from_loading
activation_checkpoint: mode selective_ac_option
activation_offload: mode
float8: enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd
  recipe_name
comm: init_timeout_seconds train_timeout_seconds trace_buf_size
memory_estimation: enabled disable_fake_mode
fault_tolerance: enable replica_id group_size min_replica_size
"""


def listed(text: str) -> list[str]:
    """Return the dotted keys of a listing."""
    sections = " ".join(text.split()).replace(": ", ":").split()
    dotted_keys, section = [], ""
    for word in sections:
        if ":" in word:
            section, word = word.split(":")
        dotted_keys.append(f"{section}.{word}")
    return dotted_keys


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a job from values by dotted key."""

    def load(values: dict[str, object], *arguments: str):
        tables: dict[str, dict] = {}
        for key, value in values.items():
            section, _, name = key.rpartition(".")
            tables.setdefault(section, {})[name] = value
        path = tmp_path / "job.toml"
        path.write_text(tomli_w.dumps(tables), encoding="utf-8")
        return load_job([str(path), *arguments])

    return load


@pytest.mark.parametrize("listing", [TORCHTITAN, FLAME], ids=["torchtitan", "flame"])
def test_every_key_of_other_tools_is_known(listing):
    unknown = [key for key in listed(listing) if key not in {*keys(), *RENAMED, *REFUSED, *PENDING}]
    assert unknown == []


def test_no_key_is_both_accepted_and_refused():
    assert not set(keys()) & set(REFUSED)
    assert not set(keys()) & set(RENAMED)
    assert not set(RENAMED) & set(REFUSED)
    assert all(new.to in keys() for new in RENAMED.values())


ANOTHER = {bool: lambda value: not value, int: lambda value: value + 7, str: lambda value: value + "x"}


@pytest.mark.parametrize("old", RENAMED)
def test_a_renamed_key_is_read_with_a_note(load, old):
    key = keys()[RENAMED[old].to]
    # A key whose default is None gets a number, a choice or a name; every other key gets its default.
    unset = {"seed": 2, "prefetch_factor": 2, "recipe_name": "rowwise"}.get(key.name, "name")
    value = unset if key.default is None else key.default
    extra = (
        {"training.dataloader.num_workers": 1}
        if "dataloader" in RENAMED[old].to and "num_workers" not in old
        else {}
    )
    job = load({old: value} | extra)
    assert get(job, RENAMED[old].to) == value
    (note,) = job.notes
    assert f"{old} ({RENAMED[old].of}): read as {RENAMED[old].to} = " in note


@pytest.mark.parametrize("section", ["", "training.", "nowhere."])
def test_a_foreign_name_is_refused_with_the_key_here(load, section):
    for name, ours in ELSEWHERE.items():
        assert ours.partition(" = ")[0] in {*keys(), "training.epochs"}
        if section + name not in keys():
            message = refusal(load, {}, f"--{section}{name}=1", kind=ConfigError)
            assert message == f"--{section}{name}: no such key; here it is {ours}"


@pytest.mark.parametrize("key", [key for key in REFUSED if REFUSED[key].off])
def test_a_refused_key_is_accepted_if_it_has_no_effect(load, key):
    for value in REFUSED[key].off:
        assert load({key: value}).notes == ()


def effective_value(key: str) -> object:
    """Return a value with which the refused `key` would have an effect."""
    off = REFUSED[key].off
    return ["x"] if off and isinstance(off[0], list) else ANOTHER[type(off[0])](off[0]) if off else "x"


ON = {
    "checkpoint.enable": True,
    "quantize.linear.float8.recipe_name": "rowwise",
    "parallelism.context_parallel_degree": 2,
    "parallelism.expert_parallel_degree": 2,
    "parallelism.pipeline_parallel_degree": 2,
}
"""Switches of titanplans, enabled."""


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_key_is_refused_by_name_with_the_reason(load, key):
    values = {key: effective_value(key)}
    refused = key
    if (switch := REQUIRES_SWITCH.get(key)) in ON:
        values[switch] = ON[switch]
    elif switch is not None:
        values[switch] = effective_value(switch)
        refused = switch  # the error names the switch, which is not supported either
    message = refusal(load, values, kind=ConfigError)
    assert f"{refused} = " in message
    assert message.endswith(f"is not supported: {REFUSED[refused].reason}")


OURS = {
    "parallelism.pipeline_parallel_layers_per_stage": 2,
    "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
    "parallelism.pipeline_parallel_microbatch_size": 2,
}
"""Non-default values of keys that titanplans has, too. Other keys get a list."""


@pytest.mark.parametrize("key", REQUIRES_SWITCH)
def test_a_key_without_its_switch_is_accepted_with_a_note(load, key):
    """Any value of such a key is accepted, and the loaded job does not contain the key."""
    values = {key: effective_value(key) if key in REFUSED else OURS.get(key, ["output"])}
    job = load(values)
    (note,) = job.notes
    assert note.endswith(f"{key} (as {REQUIRES_SWITCH[key]} is not set)")
    if key in REFUSED:
        assert job == load({})
    switch = REQUIRES_SWITCH[key]
    if switch in REFUSED and REFUSED[switch].off:
        assert load(values | {switch: REFUSED[switch].off[0]}).notes == job.notes


def test_keys_without_effect_give_one_note(load):
    """torchtitan's own job files have such keys, although their degree is 1 and they name no converter or recipe."""
    job = load(
        {
            "parallelism.tensor_parallel_degree": 8,
            "parallelism.pipeline_parallel_degree": 1,
            "parallelism.pipeline_parallel_schedule": "Interleaved1F1B",
            "parallelism.expert_parallel_degree": 1,
            "parallelism.expert_tensor_parallel_degree": 8,
            "quantize.linear.float8.filter_fqns": ["output", "router.gate"],
            "quantize.linear.mx.filter_fqns": ["output", "router.gate"],
            "quantize.grouped_mm.float8.fqns": ["experts"],
            "quantize.grouped_mm.mx.fqns": ["experts"],
        }
    )
    (note,) = job.notes
    assert note.endswith(
        "parallelism.expert_tensor_parallel_degree (as parallelism.expert_parallel_degree is not set); "
        "quantize.linear.mx.filter_fqns, quantize.grouped_mm.float8.fqns, quantize.grouped_mm.mx.fqns (as model.converters "
        "is not set); parallelism.pipeline_parallel_schedule (as parallelism.pipeline_parallel_degree is not set); "
        "quantize.linear.float8.filter_fqns (as quantize.linear.float8.recipe_name is not set)"
    )


def test_another_converter_leaves_mx_without_effect(load):
    job = load({"model.converters": ["quantize.linear.float8"], "quantize.linear.mx.filter_fqns": ["x"]})
    assert job.quantize.linear.float8.recipe_name == "tensorwise"
    assert any("quantize.linear.mx.filter_fqns (as model.converters" in note for note in job.notes)


def test_the_command_line_overrides_a_refused_key_of_the_file(load):
    """A degree of 4 in the file applies unless the command line sets it to 1; then the schedule has no effect."""
    values = {"parallelism.pipeline_parallel_degree": 4, "parallelism.pipeline_parallel_schedule": "GPipe"}
    assert load(values | {"training.local_batch_size": 8}).notes == ()
    (note,) = load(values, "--parallelism.pipeline_parallel_degree", "1").notes
    assert note.endswith(
        "parallelism.pipeline_parallel_schedule (as parallelism.pipeline_parallel_degree is not set)"
    )
    assert load({"training.varlen": True}, "--training.no-varlen").data.documents == "joined"


@pytest.mark.parametrize(
    ("values", "arguments", "key"),
    [
        # The key that names the module is refused before the keys that the module adds.
        ({"job.custom_config_module": "a.b", "data.max_patches_per_image": 1}, [], "job.custom_config_module"),
        ({"training.context_len": 64}, ["--training.varlen"], "training.context_len = 64"),
        ({"training.data_probs": "0.7,0.3"}, [], "training.data_probs.*data.sources"),
        ({"training.local_batch_size": 4, "training.batch_size": 4}, [], "training.batch_size"),
        ({"training.dataset_name": "sample"}, [], "training.dataset_name"),
    ],
)  # fmt: skip
def test_a_foreign_key_is_refused(load, values, arguments, key):
    with pytest.raises(ConfigError, match=key):
        load(values, *arguments)


@pytest.mark.parametrize(
    ("file", "typed"), [("batch_size", "local_batch_size"), ("local_batch_size", "batch_size")]
)
def test_the_command_line_overrides_under_either_name(load, file, typed):
    assert load({f"training.{file}": 4}, f"--training.{typed}", "2").training.local_batch_size == 2


@pytest.mark.parametrize(
    ("values", "key", "value", "notes"),
    [
        ({"training.dataset": "o/d", "training.dataset_name": "sample"}, "training.dataset", "o/d:sample", 1),
        ({"training.dataset": "o/d", "training.dataset_name": "default"}, "training.dataset", "o/d", 0),
        ({"model.name": "fla", "model.config": "c.json"}, "model.name", None, 1),
        ({"training.gradient_accumulation_steps": 3}, "training.gradient_accumulation_steps", 3, 0),
        ({"training.context_len": 64, "training.seq_len": 128}, "training.seq_len", 128, 0),
        ({"training.varlen": True, "training.context_len": 4096}, "data.documents", "apart", 1),
    ],
)
def test_combinations_of_keys_of_flame(load, values, key, value, notes):
    job = load(values)
    assert get(job, key) == value
    assert len(job.notes) == notes
