"""From a command line to a job: precedence, errors, `--print-config`, `--help`."""

import subprocess
import sys
import textwrap
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from titanplans.config import ConfigError, JobConfig, OptionError, load_job
from titanplans.config.lines import Source
from titanplans.config.options import options_of
from titanplans.config.other_names import REFUSED
from titanplans.config.schema import build_job, keys
from titanplans.config.translate import read_tables
from titanplans.config.values import in_toml, is_options, without_none_type

ROOT = Path(__file__).parents[2]
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
    with pytest.raises(ConfigError) as caught:
        load_job(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- what is read


def test_defaults_then_toml_then_command_line(write):
    path = write("[training]\nsteps = 7\nseq_len = 128\n")
    job = load_job([path, "--training.steps", "9"])
    assert (job.training.steps, job.training.seq_len, job.training.local_batch_size) == (9, 128, 8)


def test_groups_of_an_optimizer_are_tables_or_a_list_of_a_line(write):
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
    assert "optimizer.groups.lr = -1: expected a number, above 0" in refusal(
        [path, "--optimizer.groups=[{pattern = 'x', lr = -1}]"]
    )
    assert "--optimizer.groups norm: expected a list of tables" in refusal([path, "--optimizer.groups=norm"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--metrics.enable_wandb"], True),
        (["--metrics.enable_wandb", "true"], True),
        (["--metrics.enable_wandb=false"], False),
        (["--metrics.no-enable_wandb"], False),
        (["--metrics.no_enable_wandb"], False),
        (["--metrics.enable-wandb"], True),
        (["--metrics.enable_wandb", "--metrics.no-enable_wandb"], False),
    ],
)
def test_flags(write, words, expected):
    path = write("[metrics]\nenable_wandb = true\n")
    assert load_job([*words, path]).metrics.enable_wandb is expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--compile.dynamic"], True),
        (["--compile.no-dynamic"], False),
        (["--compile.dynamic", "none"], None),
        (["--compile.dynamic=true"], True),
    ],
)
def test_flags_that_may_be_unset(write, words, expected):
    assert load_job([*words, write("[compile]\nenable = true\n")]).compile.dynamic is expected


def test_options_of_every_kind(write):
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
def test_every_config_of_ours_loads_and_reads_back(path, write):
    job = load_job([str(path)])
    again = load_job([write(job.to_toml())])
    assert again == job
    assert again.notes == ()
    for name in (job.model.config, job.model.hf_assets_path):
        # assets/ is downloaded, as the file's head says
        assert name is None or name.startswith("assets/") or (ROOT / name).exists()


# ---------------------------------------------------------------- round trip


def values_of(hint) -> st.SearchStrategy:
    """Return values of a field's type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        base = st.sampled_from(["op", "1", "12"]) if args[0] is str else values_of(args[0])
        return base.filter(lambda value: all(rule.holds(value) for rule in args[1:]))
    if origin in (Union, UnionType):
        return st.one_of([values_of(option) for option in args])
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(st.text(), values_of(args[1]), max_size=3)
    if is_options(hint):
        fields = {field.name: values_of(without_none_type(field.hint)) for field in options_of(hint)}
        return st.fixed_dictionaries({}, optional=fields)
    return {
        NoneType: st.none(),
        bool: st.booleans(),
        int: st.integers(-1, 9) | st.integers(0),
        float: st.floats(0, 1) | st.floats(0),
        str: st.text().filter(lambda text: text != "fla"),  # flame's word, read as no name at all
    }[hint]


# Refused but for one value: only that can be written.
FIXED = {name: REFUSED[name].off[0] for name in keys() if name in REFUSED}


@given(
    data=st.data(),
    chosen=st.lists(st.sampled_from(sorted(keys())), unique=True, min_size=1, max_size=6),
)
def test_any_job_reads_back_from_its_own_toml_or_is_refused_in_one_line(data, chosen):
    values = {name: data.draw(values_of(in_toml(keys()[name].hint)), label=name) for name in chosen}
    try:
        job = build_job(values | FIXED)
    except OptionError as error:
        known = {error.option, error.option.rpartition(".")[0]}  # a key, or one of a list of tables
        assert known & set(keys())
        assert "\n" not in str(error)  # noqa: PT017
        return
    layer = read_tables(tomli.loads(job.to_toml()), Source("job.toml"))
    assert build_job(layer.values) == job
    assert layer.notes == []


def test_print_config_prints_what_reads_back_and_starts_nothing(write, capsys):
    path = write('[model]\ntokenizer_path = "a \\"quoted\\" \\\\ folder"\n[training]\nbatch_size = 3\n')
    with pytest.raises(SystemExit) as end:
        load_job([path, "--print-config", "--training.steps", "5"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert "# " + path + ": training.batch_size (flame): read as training.local_batch_size = 3" in printed
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
def test_help_of_a_section_or_a_key_is_that_alone(capsys, word, keys):
    with pytest.raises(SystemExit) as ended:
        load_job(["--help", word])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  --")] == [f"--{key}" for key in keys]
    assert "usage" not in lines[0]


def test_help_of_what_is_not_there():
    assert "--help paralelism: no section [paralelism]; did you mean [parallelism]?" in refusal(
        ["paralelism", "--help"]
    )
    assert "--help training.stepz: no such key; did you mean training.steps?" in refusal(
        ["--help", "training.stepz"]
    )


def test_help_names_every_key_with_its_documentation(capsys):
    with pytest.raises(SystemExit) as end:
        load_job(["--help"])
    assert end.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    for name, key in keys().items():
        assert f"--{name} (" in printed
        assert key.doc in printed


def test_every_section_and_key_is_documented():
    sections = [value for value in vars(JobConfig()).values() if is_dataclass(value)]
    assert all(type(section).__doc__ for section in sections)
    assert all(key.doc for key in keys().values())


def test_the_description_is_the_first_note(write):
    assert load_job([write('[job]\ndescription = "what for"\n')]).notes == ("what for",)


# ---------------------------------------------------------------- what is refused


def test_malformed_toml_names_the_place(write):
    path = write("[training]\nsteps = 10\nseq_len = = 5\n")
    assert refusal([path]).startswith(f"{path}, line 3, column 11: ")


def test_a_missing_file_names_those_beside_it(write, tmp_path):
    path = write("")
    missing = str(tmp_path / "other.toml")
    assert refusal([missing]) == f"{missing}: no such job file; there are {path}"
    assert refusal([str(tmp_path)]) == f"{tmp_path}: is a folder, not a job file; there are {path}"


def test_a_file_that_is_no_text(tmp_path):
    path = tmp_path / "job.toml"
    path.write_bytes(b"[training]\n\xff")
    assert refusal([str(path)]) == f"{path}: not UTF-8 text (byte 11), so not TOML"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainig]\nsteps = 1", "no section [trainig]; did you mean [training]?"),
        ("[trainig]", "no section [trainig]; did you mean [training]?"),
        ("[zzz]\nsteps = 1", "no section [zzz]; there are job, model, "),
        ("steps = 1", "steps: stands in no section; did you mean training.steps?"),
        ("training = 1", "training: is a section, not a key; write [training]"),
        ("[training]\nseq_length = 1", "training.seq_length: no such key; did you mean training.seq_len?"),
        ("[optimizer]\nseq_len = 1", "optimizer.seq_len: no such key; did you mean training.seq_len?"),
        ("[experimental]\nzzz = 1", "experimental.zzz: no such key; [experimental] has custom_import"),
        ("[training.dataloader]\nworkers = 1", "did you mean training.dataloader.num_workers?"),
        ('[training]\nsteps = "many"', 'training.steps = "many": expected an integer, at least 1'),
        ("[training]\nsteps = 0", "training.steps = 0: expected an integer, at least 1"),
        (
            "[training]\ndataloader = 3",
            "training.dataloader: is a section, not a key; write [training.dataloader]",
        ),
        ("[training]\nsteps = {a = 1}", 'training.steps = {"a" = 1}: expected an integer'),
        ('[optimizer]\nname = "SGD"', 'optimizer.name = "SGD": expected one of "Adam", "AdamW"'),
        (
            "[checkpoint]\nkeep_latest_k = 1",
            "checkpoint.keep_latest_k = 1: expected an integer, 0 or at least 2",
        ),
    ],
)
def test_what_is_wrong_with_a_key_in_the_file(write, text, message):
    path = write(text)
    said = refusal([path])
    assert said.startswith(f"{path}: ")
    assert message in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no job file given: titanplans train JOB.toml [--section.key value ...], see --help"),
        (
            ["a.toml", "b.toml"],
            "b.toml: a job has one file, and a.toml is given already; options begin with --",
        ),
        (["--metrics.no-enable_wandb=true"], "--metrics.no-enable_wandb=true: takes no value"),
    ],
)
def test_what_is_wrong_with_a_command_line(words, message):
    assert message in refusal(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--training.step", "1"], "--training.step: no such key; did you mean training.steps?"),
        (["--steps", "1"], "--steps: stands in no section; did you mean training.steps?"),
        (
            ["--training.steps", "--debug.deterministic"],
            "--training.steps: its value is missing; write --training.steps VALUE or --training.steps=VALUE",
        ),
        (["--training.step"], "--training.step: no such key; did you mean training.steps?"),
        (["--training.steps", "1.5"], "--training.steps 1.5: expected an integer, at least 1"),
    ],
)
def test_what_is_wrong_with_an_option(write, words, message):
    assert refusal([write(""), *words]) == message


CONTRADICTIONS = [
    (
        "[model]\nname = 'gla'\nconfig = 'c.json'",
        'model.config = "c.json": it already says which model: leave out model.name',
    ),
    ("[model]\nplan = 'gla'", "parallelism.tensor_parallel_degree = 1 splits nothing"),
    ("[training]\nglobal_batch_size = 8\ngradient_accumulation_steps = 2", "fixes the accumulation, too"),
    ("[training]\nglobal_batch_size = 12\nlocal_batch_size = 8", "8 or 16 would work"),
    ("[training]\nglobal_batch_size = 4\nlocal_batch_size = 8", ": 8 would work"),
    ("[training.dataloader]\nprefetch_factor = 2", "set training.dataloader.num_workers above 0"),
    ("[validation.dataloader]\npersistent_workers = true", "set validation.dataloader.num_workers above 0"),
    ("[training]\nsteps = 10\n[lr_scheduler]\ntotal_steps = 5", "give 10 or more, or leave it out"),
    ("[training]\nsteps = 5\n[lr_scheduler]\ntotal_steps = 10\nwarmup_steps = 20", "is longer than"),
    (
        "[training]\nsteps = 10\n[lr_scheduler]\nwarmup_steps = 6\ndecay_ratio = 0.5",
        "don't fit into 10:",
    ),
    (
        "[activation_checkpoint]\nper_op_sac_force_recompute_mm_shapes_by_fqns = ['q']",
        'selective_ac_option = "2": set that to "op"',
    ),
    ("[activation_checkpoint]\nmode = 'memory_budget'", "set compile.enable to true"),
    (
        "[activation_checkpoint]\nper_op_sac_matmuls = 'all'",
        'per_op_sac_matmuls = "all": it does nothing with',
    ),
    (
        "[parallelism]\ndata_parallel_strategy = 'megatron_fsdp'",
        "in a loop of your own ParallelManager(MegatronFSDPConfig())",
    ),
    (
        "[ddp]\nstatic_graph = true",
        'ddp.static_graph = true: it does nothing with parallelism.data_parallel_strategy = "fsdp2"',
    ),
    *(
        (f"[parallelism]\ndata_parallel_strategy = 'ddp'\n{more}", said)
        for more, said in (
            (
                "tensor_parallel_degree = 2",
                "tensor_parallel_degree = 2: it does nothing with parallelism.data_parallel_strategy = ",
            ),
            ("data_parallel_shard_degree = 2", "data_parallel_replicate_degree for the copies"),
            (
                "fsdp_forward_prefetch = 1",
                "parallelism.fsdp_forward_prefetch = 1: it does nothing with",
            ),
            (
                "[training]\nmixed_precision_output = 'float32'",
                'mixed_precision_output = "float32": it does nothing with',
            ),
            ("[validation]\nunshard = true", "validation.unshard = true: it does nothing with"),
        )
    ),
    (
        "[compile]\nenable = true\ncomponents = ['optimizer']",
        'optimizer.implementation = "fused": it is one kernel',
    ),
    ("[compile]\nenable = true\ncomponents = []", 'name "model", "loss" or "optimizer"'),
    (
        "[parallelism]\nenable_async_tensor_parallel = true",
        "in compile.components and tensor_parallel_degree above 1",
    ),
    (
        "[parallelism]\nenable_async_tensor_parallel = true\ntensor_parallel_degree = 2\n[training]\nseq_len = 513\n"
        "[compile]\nenable = true\nbackend = 'aot_eager'",
        'needs compile.backend = "inductor" and training.seq_len = 513 to be a multiple of tensor_parallel_degree = 2',
    ),
    (
        "[parallelism]\nasync_tensor_parallel_unfused = 'warn'",
        'async_tensor_parallel_unfused = "warn": it does nothing with enable_async_tensor_parallel = false',
    ),
    ("[checkpoint]\nfolder = ' '", "expected a path, not nothing"),
    (
        "[checkpoint]\nload_step = 3",
        "checkpoint.load_step = 3: it does nothing with checkpoint.enable = false",
    ),
    (
        "[checkpoint]\ninitial_load_path = 'x'",
        'checkpoint.initial_load_path = "x": it does nothing with',
    ),
    ("[checkpoint]\ninitial_load_model_only = false", "needs checkpoint.initial_load_path"),
    (
        "[checkpoint]\nenable = true\nload_only = true\nenable_first_step_checkpoint = true",
        "keep one of them",
    ),
    ("[profiling]\nenable_profiling = true\nprofile_freq = 2", "4 or more would work"),
    ("[debug]\ndeterministic_warn_only = true", "it does nothing with debug.deterministic = false"),
]


@pytest.mark.parametrize(("text", "message"), CONTRADICTIONS)
def test_contradictions_name_the_way_out(write, text, message):
    assert message in refusal([write(text)])


def test_a_run_shorter_than_its_warm_up_is_no_contradiction(write):
    job = load_job([write("[lr_scheduler]\nwarmup_steps = 20"), "--training.steps", "5"])
    assert job.training.steps == 5


def test_the_configuration_itself_needs_no_torch():
    """A mistake in a TOML file is told at once."""
    code = """
        import sys
        from titanplans.config import load_job
        load_job(["configs/gla_debug.toml"])
        assert "torch" not in sys.modules, "torch was imported"
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
