"""From a command line to a job: precedence, errors, `--print-config`, `--help`."""

import textwrap

import pytest

from tests.support import refusals
from tests.support.paths import ROOT
from tests.support.programs import run_python
from titanplans.config import ConfigError, JobConfig, OptionError, load_job
from titanplans.config.lines import line_of
from titanplans.config.options import Options
from titanplans.config.schema import keys
from titanplans.errors import nearest

CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a job file and returns its path."""

    def write(text: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return str(path)

    return write


def refusal(argv: list[str]) -> str:
    return refusals.refusal(load_job, argv, kind=ConfigError)


# ---------------------------------------------------------------- reading


def test_defaults_then_toml_then_command_line(write):
    path = write("[training]\nsteps = 7\nseq_len = 128\n")
    job = load_job([path, "--training.steps", "9"])
    assert (job.training.steps, job.training.seq_len, job.training.local_batch_size) == (9, 128, 8)


def test_groups_of_an_optimizer_are_tables_or_one_line(write):
    path = write("""
        [optimizer]
        lr = 1e-3
        [[optimizer.groups]]
        pattern = 'layers\\.0\\.'
        lr = 1e-4
        [[optimizer.groups]]
        pattern = "norm"
        weight_decay = 0
        """)
    job = load_job([path])
    assert [(group.pattern, group.lr, group.weight_decay) for group in job.optimizer.groups] == [
        (r"layers\.0\.", 1e-4, None),
        ("norm", None, 0.0),
    ]
    assert load_job([write(job.to_toml())]) == job
    (group,) = load_job([path, "--optimizer.groups", "[{pattern = 'x', name = 'Muon'}]"]).optimizer.groups
    assert (group.pattern, group.name) == ("x", "Muon")
    with pytest.raises(OptionError) as caught:
        load_job([path, "--optimizer.groups=[{pattern = 'x', lr = -1}]"])
    assert caught.value.option == "optimizer.groups.lr"
    assert "--optimizer.groups norm: " in refusal([path, "--optimizer.groups=norm"])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--metrics.enable_wandb"], True),
        (["--metrics.enable_wandb", "true"], True),
        (["--metrics.enable_wandb=false"], False),
        (["--metrics.no-enable_wandb"], False),
        (["--metrics.no_enable_wandb"], False),
        (["--metrics.enable-wandb"], True),
        (["--metrics.enable_wandb", "--metrics.no-enable_wandb"], False),
        (["--compile.dynamic"], True),
        (["--compile.no-dynamic"], False),
        (["--compile.dynamic", "none"], None),
    ],
)
def test_flags_of_booleans(write, arguments, expected):
    job = load_job([*arguments, write("[metrics]\nenable_wandb = true\n")])
    assert (job.compile.dynamic if "dynamic" in arguments[0] else job.metrics.enable_wandb) is expected


def test_options_of_every_type(write):
    job = load_job(
        [
            write(""),
            "--checkpoint.load_step=-1",
            "--lr_scheduler.min_lr_factor",
            "1e-1",
            "--compile.components",
            "loss",
            "--training.dataloader.num_workers",
            "2",
            "--debug.seed",
            "none",
        ]
    )
    assert job.lr_scheduler.min_lr_factor == 0.1
    assert job.compile.components == ("loss",)
    assert job.training.dataloader.num_workers == 2
    assert job.debug.seed is None


def test_the_file_may_be_named_as_torchtitan_and_flame_do(write):
    path = write("[training]\nsteps = 3\n")
    assert load_job(["--job.config_file", path]).training.steps == 3


def test_a_plan_may_be_a_table(write):
    path = write('[parallelism]\ntensor_parallel_degree = 2\n[model.plan]\n"layers.*.attn" = "attn_input"\n')
    assert load_job([path]).model.plan == {"layers.*.attn": "attn_input"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_in_configs_is_loaded_and_read_back(path, write):
    job = load_job([str(path)])
    again = load_job([write(job.to_toml())])
    assert again == job
    assert again.notes == ()
    for name in (job.model.config, job.model.hf_assets_path):
        assert name is None or name.startswith(("Qwen/", "fla-hub/", "google/")) or (ROOT / name).exists()


# ---------------------------------------------------------------- printing


def test_print_config_prints_a_readable_job_and_starts_nothing(write, capsys):
    path = write('[model]\ntokenizer_path = "a \\"quoted\\" \\\\ folder"\n[training]\nbatch_size = 3\n')
    with pytest.raises(SystemExit) as end:
        load_job([path, "--print-config", "--training.steps", "5"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert (
        "# " + path + ", line 4: training.batch_size (flame): read as training.local_batch_size = 3"
        in printed
    )
    job = load_job([write(printed)])
    assert (job.training.steps, job.training.local_batch_size) == (5, 3)
    assert job.model.hf_assets_path == 'a "quoted" \\ folder'


def test_only_rank_0_prints(write, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        load_job([write(""), "--print-config"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("parallelism", [key for key in keys() if key.startswith("parallelism.")]),
        ("training.chat", [key for key in keys() if key.startswith("training.chat.")]),
        ("quantize", [key for key in keys() if key.startswith("quantize.linear.float8.")]),
        ("training.steps", ["training.steps"]),
        ("seq_len", ["training.seq_len", "validation.seq_len"]),
    ],
)
def test_help_of_a_section_or_a_key_has_only_these_keys(capsys, word, keys):
    with pytest.raises(SystemExit) as ended:
        load_job(["--help", word])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  --")] == [f"--{key}" for key in keys]
    assert "usage" not in lines[0]


@pytest.mark.parametrize(
    ("word", "meant"), [("paralelism", "did you mean parallelism?"), ("training.stepz", "training.steps")]
)
def test_help_of_an_unknown_word_names_the_nearest(word, meant):
    assert refusal([word, "--help"]).startswith(f"--help {word}: ")
    assert meant in refusal([word, "--help"])


def test_help_names_every_key_with_its_documentation(capsys):
    with pytest.raises(SystemExit) as end:
        load_job(["--help"])
    assert end.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name, key in keys().items():
        assert f"--{name} (" in printed
        assert key.doc in printed


def test_every_section_and_key_is_documented():
    sections = [value for value in vars(JobConfig()).values() if isinstance(value, Options)]
    assert all(type(section).__doc__ for section in sections)
    assert all(key.doc for key in keys().values())


def test_the_description_is_the_first_note(write):
    assert load_job([write('[job]\ndescription = "what for"\n')]).notes == ("what for",)


# ---------------------------------------------------------------- refusals


def test_malformed_toml_names_the_line(write):
    path = write("[training]\nsteps = 10\nseq_len = = 5\n")
    message = refusal([path])
    assert message.startswith(f"{path}, line 3, column 11: ")
    assert message.endswith("in 'seq_len = = 5'")


def test_all_values_of_another_type_are_reported_together(write):
    path = write("[training]\nsteps = 'x'\nseq_len = 4\n[optimizer]\nlr = 'high'\n")
    assert refusal([path]) == (
        f'{path} has 2 wrong keys: line 2: training.steps = "x": expected an integer, at least 1 | '
        'line 5: optimizer.lr = "high": expected a number, above 0'
    )
    words = ["--training.steps=x", "--optimizer.lr=high"]
    assert refusal([write(""), *words]).startswith("the command line has 2 wrong keys: --training.steps x: ")


def test_help_on_a_part_of_a_name_names_the_keys_that_contain_it():
    assert refusal(["warmup", "--help"]).endswith(
        "there is lr_scheduler.warmup_steps, profiling.profiler_warmup"
    )


def test_all_unknown_keys_of_a_file_are_reported_together(write):
    path = write("[training]\nstepz = 1\nsteps = 'x'\n[trainig]\na = 1\n[optimizer]\nlearning_rate = 1.0\n")
    assert refusal([path]) == (
        f"{path} has 3 unknown keys: line 2: training.stepz: no such key; did you mean training.steps? | line 4: no "
        "section [trainig]; did you mean training? | line 7: optimizer.learning_rate: no such key; here it is optimizer.lr"
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.yaml", "is YAML, probably another tool's"),
        ("a.yml", "is YAML, "),
        ("a.md", "is a .md file"),
        ("a.json", "is a .json file"),
    ],
)
def test_a_file_of_another_format_is_refused_with_its_format(tmp_path, name, kind):
    path = tmp_path / name
    path.write_text("# A title, which would be a job of defaults\n")
    message = refusal([str(path)])
    assert message.startswith(f"{path} {kind}")
    assert "but a job file is TOML" in message


def test_a_missing_file_names_the_others_of_its_directory(write, tmp_path):
    path = write("")
    for missing in (str(tmp_path / "other.toml"), str(tmp_path)):
        assert refusal([missing]).startswith(f"{missing}: ")
        assert path in refusal([missing])


def test_a_file_of_that_name_in_a_subfolder_is_suggested(write, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gla_debug.toml").touch()
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("gla_debug.toml", "gla_debg.toml"):
        assert refusal([name]) == f"{name}: no such job file; did you mean configs/gla_debug.toml?"
    assert refusal(["zzz.toml"]) == "zzz.toml: no such job file; name one that exists"


@pytest.mark.parametrize(
    ("text", "line", "key", "meant"),
    [
        ("[trainig]\nsteps = 1", 1, "[trainig]", "did you mean training?"),
        ("[trainig]", 1, "[trainig]", "did you mean training?"),
        ("\n[zzz]\nx = 1", 2, "[zzz]", "titanplans train --help"),
        ("\n[zzz]\nsteps = 1", 2, "[zzz]", "here steps is training.steps"),
        (
            "[step_scheduler]\nckpt_every_steps = 1",
            1,
            "[step_scheduler]",
            "here ckpt_every_steps is checkpoint.interval",
        ),
        (
            "[optimizer]\nfused = true",
            2,
            "optimizer.fused: ",
            'here it is optimizer.implementation = "fused"',
        ),
        ("steps = 1", 1, "steps: ", "training.steps"),
        ("training = 1", 1, "training: ", "[training]"),
        ("[training]\nseq_length = 1", 2, "training.seq_length", "training.seq_len?"),
        ("[optimizer]\nseq_len = 1", 2, "optimizer.seq_len", "training.seq_len?"),
        ("[experimental]\nzzz = 1", 2, "experimental.zzz", "--help experimental"),
        ("[training.dataloader]\n# workers\nworkers = 1", 3, "workers", "training.dataloader.num_workers"),
        ("[training]\ndataloader = 3", 2, "training.dataloader: ", "[training.dataloader]"),
        ('[training]\nseq_len = 8\nsteps = "many"', 3, 'training.steps = "many": ', "integer"),
        ("[training]\nsteps = 0", 2, "training.steps = 0: ", "at least 1"),
        ("[training]\nsteps = {a = 1}", 2, 'training.steps = {"a" = 1}: ', "integer"),
        ('[optimizer]\nname = "SGD"', 2, 'optimizer.name = "SGD": ', "AdamW"),
        ("[checkpoint]\nkeep_latest_k = 1", 2, "checkpoint.keep_latest_k = 1: ", "at least 2"),
        ("[checkpoint]\nfolder = ' '", 2, "checkpoint.folder = ", "path"),
    ],
)
def test_a_wrong_key_in_the_file_is_named_with_its_line_and_the_remedy(write, text, line, key, meant):
    path = write(text)
    message = refusal([path])
    assert message.startswith(f"{path}, line {line}: ")
    assert key in message
    assert meant in message


def test_the_line_of_a_key_after_values_of_several_lines():
    text = 'a = """\nsteps = 1\n"""\n[x]\nwords = [\n  "steps",\n]\n\n  steps = 3\n[[x.y]]\nz = 1'
    assert [line_of(text, key) for key in ("a", "x", "x.words", "x.steps", "x.y.z", "x.z")] == [
        1,
        4,
        5,
        9,
        11,
        None,
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--training.step", "1"], "--training.step: "),
        (["--training.step"], "--training.step: "),
        (["--steps", "1"], "--steps: "),
        (["--training.steps", "--debug.deterministic"], "--training.steps: "),
        (["--training.steps", "1.5"], "--training.steps 1.5: "),
        (["--metrics.no-enable_wandb=true"], "--metrics.no-enable_wandb=true: "),
        (["b.toml"], "b.toml: "),
    ],
)
def test_a_wrong_option_is_named(write, arguments, named):
    assert refusal([write(""), *arguments]).startswith(named)


@pytest.mark.parametrize(("word", "meant"), [("yocco", "yoco"), ("foo", None), ("lama", "llama")])
def test_suggestions_need_enough_common_letters(word, meant):
    assert nearest(word, ["yoco", "llama", "gla"]) == meant


def test_a_missing_job_file_argument_is_refused():
    assert "titanplans train JOB.toml" in refusal([])
    with pytest.raises(ConfigError, match=r"titanplans data JOB\.toml"):
        load_job([], "data")


DDP, CHECKPOINT = "[parallelism]\ndata_parallel_strategy = 'ddp'\n", "[checkpoint]\nenable = true\n"
ASYNC = "[parallelism]\nenable_async_tensor_parallel = true\n"
COMPILED = "[compile]\nenable = true\n"
IN_HF, DROPOUT = "initial_load_in_hf = true\ninitial_load_path = 'x'\n", "[lora]\nrank = 2\ndropout = 0.1\n"
CONTRADICTIONS = [
    ("[model]\nname = 'gla'\nconfig = 'c.json'", "model.config"),
    ("[model]\nname = 'gla'\nclass = 'a:B'", "model.class"),
    ("[model]\narguments = {a = 1}", "model.arguments"),
    ("[model]\nclass = 'a:B'\nconfig_overrides = {n_positions = 8}", "model.config_overrides"),
    ("[model]\nconfig_overrides = {n_positions = 8, hidden_size = 8}", "model.config_overrides"),
    ("[model]\nplan = 'gla'", "model.plan"),
    ("[training]\nglobal_batch_size = 8\ngradient_accumulation_steps = 2", "training.gradient_accumulation_steps"),
    ("[training]\nglobal_batch_size = 12\nlocal_batch_size = 8", "training.global_batch_size"),
    ("[training]\nskip_nan_inf_limit = 3", "training.skip_nan_inf_limit"),
    ("[training.chat]\npacking = false", "training.chat.packing"),
    ("[training.chat]\nenable = true\n[training]\ntext_column = 'x'", "training.text_column"),
    ("[training.dataloader]\nprefetch_factor = 2", "training.dataloader.prefetch_factor"),
    ("[validation.dataloader]\npersistent_workers = true", "validation.dataloader.persistent_workers"),
    ("[training]\nsteps = 10\n[lr_scheduler]\ntotal_steps = 5", "lr_scheduler.total_steps"),
    ("[training]\nsteps = 5\n[lr_scheduler]\ntotal_steps = 10\nwarmup_steps = 20", "lr_scheduler.warmup_steps"),
    ("[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 6\ndecay_ratio = 0.5", "lr_scheduler.decay_ratio"),
    ("[parallelism]\ndata_parallel_strategy = 'megatron_fsdp'", "parallelism.data_parallel_strategy"),
    ("[parallelism]\nasync_tensor_parallel_unfused = 'warn'", "parallelism.async_tensor_parallel_unfused"),
    ("[ddp]\nstatic_graph = true", "ddp.static_graph"),
    (f"{DDP}tensor_parallel_degree = 2", "parallelism.tensor_parallel_degree"),
    (f"{DDP}data_parallel_shard_degree = 2", "parallelism.data_parallel_shard_degree"),
    (f"{DDP}fsdp_forward_prefetch = 1", "parallelism.fsdp_forward_prefetch"),
    (f"{DDP}[training]\nmixed_precision_output = 'float32'", "training.mixed_precision_output"),
    (f"{DDP}[validation]\nunshard = true", "validation.unshard"),
    (f"{COMPILED}components = ['optimizer']", "optimizer.implementation"),
    (ASYNC, "parallelism.enable_async_tensor_parallel"),
    (f"{ASYNC}tensor_parallel_degree = 2\n{COMPILED}backend = 'eager'", "parallelism.enable_async_tensor_parallel"),
    ("[checkpoint]\nload_step = 3", "checkpoint.load_step"),
    ("[checkpoint]\ninitial_load_path = 'x'", "checkpoint.initial_load_path"),
    ("[checkpoint]\ninitial_load_model_only = false", "checkpoint.initial_load_model_only"),
    (f"{CHECKPOINT}load_only = true\nenable_first_step_checkpoint = true", "checkpoint.enable_first_step_checkpoint"),
    (f"{CHECKPOINT}save_adapters_only = true", "checkpoint.save_adapters_only"),
    (f"{CHECKPOINT}initial_adapter_path = 'x'", "checkpoint.initial_adapter_path"),
    (f"{CHECKPOINT}create_seed_checkpoint = true\ninitial_load_path = 'x'", "checkpoint.create_seed_checkpoint"),
    (f"{CHECKPOINT}last_save_in_hf = true\nlast_save_model_only = false", "checkpoint.last_save_in_hf"),
    (f"{CHECKPOINT}initial_load_in_hf = true", "checkpoint.initial_load_in_hf"),
    (f"{CHECKPOINT}{IN_HF}initial_load_model_only = false", "checkpoint.initial_load_model_only"),
    ("[lora]\nalpha = 2", "lora.alpha"),
    (
        f"{DROPOUT}[activation_checkpoint]\nmode = 'full'\npreserve_rng_state = false",
        "activation_checkpoint.preserve_rng_state",
    ),
    ("[profiling]\nenable_profiling = true\nprofile_freq = 2", "profiling.profile_freq"),
    ("[debug]\ndeterministic_warn_only = true", "debug.deterministic_warn_only"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "option"), CONTRADICTIONS)
def test_a_contradiction_names_an_option_and_its_line(write, text, option):
    path = write(text)
    with pytest.raises(OptionError) as caught:
        load_job([path])
    assert caught.value.option == option
    name = option.rpartition(".")[2]
    lines = [index for index, line in enumerate(text.split("\n"), 1) if line.startswith(f"{name} = ")]
    assert caught.value.where == (f"{path}, line {lines[0]}" if lines else "")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("second", "line"), [("lr = 1\npattern = '('", 6), ("lr = -1\npattern = 'b'", 5), ("pattern = 'b'", 5)]
)
def test_an_error_in_a_table_of_a_list_names_its_line(write, second, line):
    path = write(f"[[optimizer.groups]]\npattern = 'a'\nlr = 1.0\n[[optimizer.groups]]\n{second}")
    with pytest.raises(OptionError) as caught:
        load_job([path])
    assert caught.value.where == f"{path}, line {line}"


def test_a_run_shorter_than_its_warm_up_is_no_contradiction(write):
    job = load_job([write("[lr_scheduler]\nwarmup_steps = 20"), "--training.steps", "5"])
    assert job.training.steps == 5


def test_the_configuration_needs_no_torch():
    """A mistake in a TOML file is reported before torch is imported."""
    code = """
        import sys
        from titanplans.config import load_job
        load_job(["configs/gla_debug.toml"])
        assert "torch" not in sys.modules, "torch was imported"
    """
    result = run_python("-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr
