"""A thousand bad jobs: each ends in one line and exit status 2, and leaves nothing behind; or it was not bad, and loads.

Keys, sections and paths come from the table of options, so a new option is among them without being named here. What is
drawn is the same in every run; `make test-exhaustive` draws more. Findings are in FOUND, or a test of the code that met it.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import tomli
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support import option_values
from titanplans.cli.main import main
from titanplans.config.other_names import REFUSED, RENAMED
from titanplans.config.schema import keys
from titanplans.config.translate import CONVERTERS, PENDING
from titanplans.config.values import FilePath
from titanplans.training.job import outputs
from titanplans.training.launch import launcher as launch
from titanplans.training.launch import rank

GLA = {"model_type": "gla", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "vocab_size": 4096}
JOB = """
[model]
config = "gla.json"
[training]
dataset_path = "text.txt"
seq_len = 32
local_batch_size = 1
steps = 2
mixed_precision_param = "float32"
"""
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def drawing(number):
    """Return the settings of a property that is tried that often, the same each time."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=number, derandomize=True, database=None, suppress_health_check=checks)


@pytest.fixture
def folder(tmp_path, tmp_path_factory, monkeypatch):
    """A folder with a job's files, and with others that are none."""
    import datasets
    import huggingface_hub

    for library in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    monkeypatch.setattr(rank, "run_rank", lambda job: 0)
    monkeypatch.setattr(
        launch, "launch", lambda *job: 0
    )  # a fork of a process with other tests' threads crashes
    monkeypatch.setattr(
        outputs, "locked", lambda job: contextlib.nullcontext()
    )  # what runs makes its folders
    monkeypatch.chdir(tmp_path)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    Path("job.toml").write_text(JOB)
    Path("gla.json").write_text(json.dumps(GLA))
    Path("text.txt").write_text("the quick brown fox\n" * 10_000)
    Path("file").touch()
    Path("empty").mkdir()
    Path("binary").write_bytes(bytes(range(256)))
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    os.symlink("/nonexistent/folder", "nowhere")
    return tmp_path


def ends(*words):
    """Run `titanplans train` here, up to where ranks would start; hold it to its promise, and return the exit status."""
    root, before = logging.getLogger(), there()
    handlers, level = root.handlers[:], root.level
    environment = dict(os.environ)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["train", *words])
    except SystemExit as ended:
        status = ended.code
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
    said = err.getvalue()
    assert status in (0, 2), said
    if status == 0:
        assert said == ""
    else:
        assert said.startswith("error: ")
        assert len(said.splitlines()) == 1
        assert said[:-1].isprintable()
        assert len(said) < 3000
    assert there() == before
    return status


def there():
    return sorted(str(path) for path in Path().rglob("*"))


def loads(*words):
    """As `ends`, for a job that is read and not checked, which takes no time: it needs no torch."""
    before = time.process_time()
    status = ends(*words, "--print-config")
    # Collecting the garbage of a long run takes seconds, reading that grows with the square of a long value minutes.
    assert time.process_time() - before < 10
    return status


# ---------------------------------------------------------------- values and keys

TEXTS = [
    "", " ", "none", "-1", "0", "1", "2", "nan", "inf", "-inf", "1e400", "1e308", "1e-400", "true", "True", "no", "0x1f",
    "1_0", "9223372036854775807", "9223372036854775808", "9" * 30, "9" * 5000, "--help", "-h", "=", ",", "a,b", "[", "[]",
    "[1]", "{", "{}", "{a=1}", ":", "a:b", "a:b:c", "~", "~nobody-at-all/x", "$NOT_SET/x", "${", "/", "..", "/proc/x",
    "x" * 300, "y/" * 3000, "a\nb", "\x1b[31m", "\x00", "\udcff", "\u2028", "é", "\u202e", "auto", "default",
]  # fmt: skip
LITERALS = [
    "0", "-1", "1", "2", "3.0", "-0.0", "nan", "inf", "-inf", "1e400", "1e308", "5e-324", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "9" * 30, "9" * 5000, "0x" + "f" * 5000, "true", "false", "[]", "[[]]",
    "[1]", '["a"]', '["a", 1]', "[{}]", "{}", "{a = 1}", '{a = "b"}', "{a = {b = 1979-05-27}}", "1979-05-27",
    "1979-05-27T07:32:00Z", "07:32:00", "[" * 50 + "]" * 50, "[" * 5000, "'", '"', "", "_", "0b2", '"\\ud800"', '"""a\nb"""',
]  # fmt: skip
KEYS = sorted({*keys(), *RENAMED, *REFUSED, *PENDING, CONVERTERS})
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS})
PATHS = sorted(name for name, key in keys().items() if key.hint in (FilePath, FilePath | None))
text = st.sampled_from(TEXTS) | st.text(max_size=8)
literal = st.sampled_from(LITERALS) | text.map(lambda value: json.dumps(value, ensure_ascii=False))


def nearly(word):
    """Keys as they are, and some that are not quite."""
    return st.sampled_from(
        [word, word, word, word, word[:-1], word + ".x", word.upper(), f"{word} ", f'"{word}"']
    )


key = st.sampled_from(KEYS).flatmap(nearly) | st.sampled_from(SECTIONS) | st.just("")


@st.composite
def toml_lines(draw):
    """Lines of TOML with one key: dotted, in its section, as a section, as an array of sections, given twice."""
    name, value = draw(key), draw(literal)
    section, _, last = name.rpartition(".")
    return draw(
        st.sampled_from(
            [
                f"{name} = {value}",
                f"[{section}]\n{last} = {value}",
                f"[{section}]\n{last} = {value}",
                f"[{name}]\nx = {value}",
                f"[[{section}]]\n{last} = {value}",
                f"[{section}]\n{last} = {value}\n{last} = {value}",
                f"{section} = {{{last} = {value}}}",
            ]
        )
    )


@st.composite
def words(draw):
    """Words of a command line with one option."""
    name, value = draw(key), draw(text)
    section, _, last = name.rpartition(".")
    forms = [
        [f"--{name}={value}"],
        [f"--{name}={value}"],
        [f"--{name}", value],
        [f"--{name}"],
        [f"--{name}="],
        [f"--{section}.no-{last}"],
        [f"--{section}.no_{last}={value}"],
        [f"--{name}={value}", f"--{name}={value}x"],
        [f"-{name}"],
        [value],
    ]
    return draw(st.sampled_from(forms))


# ---------------------------------------------------------------- what needs no torch


def a_file(folder, lines):
    Path("drawn.toml").write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    loads("drawn.toml")


def a_command_line(folder, drawn):
    loads("job.toml", *(word for option in drawn for word in option))


def some_bytes(folder, content):
    Path("drawn.toml").write_bytes(content)
    loads("drawn.toml")


def an_environment(folder, variables):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        loads("job.toml")


some_lines = st.lists(toml_lines(), max_size=3).filter(lambda lines: all(map(_is_written, lines)))
cut = st.integers(0, len(JOB)).flatmap(
    lambda place: st.binary(max_size=9).map(lambda more: JOB[:place].encode() + more)
)
variable = st.text(max_size=4).filter(lambda value: "\0" not in value and _is_written(value))
environments = st.fixed_dictionaries(
    {}, optional={name: st.just(good) | st.sampled_from(["", "-1", "0", "1", "65536", "x", "9" * 30]) | variable
                  for name, good in TORCHRUN.items()}
)  # fmt: skip


def _is_written(value):
    return not any(
        "\ud800" <= character < "\udc80" or "\udcff" < character <= "\udfff" for character in value
    )


@pytest.mark.parametrize(
    "path", ["empty", "binary", "fifo", "loop", "nowhere", "file/x", "x" * 300, "a\0b", "/proc/self/mem"]
)
def test_a_place_where_no_job_is(folder, path):
    assert loads(path) == loads("--job.config_file", path) == 2


FOUND = [
    ["--training.steps", "--help"],
    ["--training.steps", "-h"],
    ["--training.steps=--help"],
    ["--training.steps", "--print-config"],
    ["--training.steps"],
    ["--model.name="],
    ["--activation_checkpoint.selective_ac_option", "9" * 5000],
    ["--comm.init_timeout_seconds", "99999999999"],
    ["--comm.save_traces_file_prefix", "a/b"],
    ["--training.steps", "9223372036854775808"],
    ["--optimizer.lr", "inf"],
    ["--optimizer.eps", "nan"],
    ["--job.dump_folder="],
    ["--job.dump_folder", "~nobody-at-all"],
    ["--job.dump_folder", "$NOT_SET"],
    ["--job.dump_folder", "\udcff"],
    ["--training.steps", "a\nb"],
    ["--" + "x" * 100_000],
]


@pytest.mark.parametrize("typed", FOUND)
def test_what_was_found_on_command_lines(folder, typed):
    assert loads("job.toml", *typed) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"[training]\nsteps = " + b"9" * 5000,
        b"[training]\nsteps = 0x" + b"f" * 5000,
        b"[training]\nsteps = {a = [0x" + b"f" * 5000 + b"]}",
        b"a = " + b"[" * 100_000,
        b"[" + b".".join([b"a"] * 5000) + b"]",
        b'[training]\n"a\\u0000b" = 1',
        b'[training]\n"a\\nb" = 1',
        b'[job]\ndump_folder = "a\\u0000b"',
    ],
)
def test_what_was_found_in_files(folder, content):
    Path("drawn.toml").write_bytes(content)
    assert loads("drawn.toml") == 2


# ---------------------------------------------------------------- what is checked with torch, before a rank starts

# What the paths of a job are read or written for.
SWITCHES = (
    "--checkpoint.enable",
    "--metrics.enable_jsonl",
    "--metrics.enable_tensorboard",
    "--profiling.enable_profiling",
    "--validation.enable",
    "--validation.steps=1",
)
PLACES = [
    "", " ", ".", "..", "file", "file/x", "binary", "empty", "empty/x", "new/deep", "fifo", "fifo/x", "loop", "loop/x",
    "nowhere", "nowhere/x", "job.toml", "x" * 300, "y/" * 2500, "/proc/x", "/proc/self", "/proc/self/mem", "/sys/x", "/dev",
    "/dev/null", "/dev/null/x", "/", "~nobody-at-all", "$NOT_SET/x", "a\0b", "a\nb", "\udcff", "*", "**", "[", "*/" * 40,
]  # fmt: skip
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"the": 0, "quick": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
}
ROW = {"text": "the quick brown fox " * 5, "id": 1}
CARD, METADATA = "outputs/checkpoint/step-5/titanplans.json", "outputs/checkpoint/step-5/.metadata"
FILES = {
    "gla.json": json.dumps(GLA).encode(),
    "text.txt": b"the quick brown fox\n" * 10_000,
    "rows.jsonl": (json.dumps(ROW) + "\n").encode() * 40,
    "tokenizer/tokenizer.json": json.dumps(TOKENIZER).encode(),
    "tokenizer/tokenizer_config.json": json.dumps({"bos_token": "the", "add_bos_token": True}).encode(),
    "outputs/metrics.jsonl": b'{"step": 1, "loss": 2.0}\n',
    CARD: b"{}",
    METADATA: b"",
}
ANYTHING = [None, True, 0, -1, 2**31, 2**63, 1e308, "", "x", "the", [], [1], {}, {"a": 1}, [[]], "\ud800"]


def variants(value):
    """Yield variants of a JSON value: one part replaced or left out."""
    for other in ANYTHING:
        yield other
    for place in value if isinstance(value, dict) else ():
        yield {name: value[name] for name in value if name != place}
        for other in variants(value[place]):
            yield value | {place: other}


def damaged(name):
    """Return bytes that are not quite those of the file; or a word for what stands in its place."""
    good = FILES[name]
    place = st.integers(0, min(len(good), 400))
    junk = [b"", b"\x00\xff\xfe", b"\xef\xbb\xbf", b"[" * 100_000, b"[NaN]", b"null", b"{", b'{"text": 1}\n']
    kinds = [
        st.sampled_from(["folder", "loop", "nowhere", "fifo", "nothing"]),
        st.sampled_from(junk),
        place.map(lambda end: good[:end]),
        st.tuples(place, st.sampled_from(junk)).map(lambda cut: good[: cut[0]] + cut[1] + good[cut[0] :]),
        st.sampled_from(junk).map(lambda more: good + more),
    ]
    if name.endswith((".json", ".jsonl")):
        first = json.loads(good.splitlines()[0] if good else b"{}")
        others = [json.dumps(other).encode() + b"\n" for other in variants(first)]
        kinds += [st.sampled_from(others), st.sampled_from(others).map(lambda more: good + more)]
    return st.tuples(st.just(name), st.one_of(kinds))


def put(path, content):
    """Let `content` stand in place of the file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove(path)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    elif content == "fifo":
        os.mkfifo(path)
    elif content != "nothing":
        path.symlink_to(path.name if content == "loop" else "/nonexistent/file")


def remove(path):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def a_path(folder, drawn):
    key, place = drawn
    ends("job.toml", *SWITCHES, f"--{key}={place}")


def a_damaged_file(folder, drawn):
    name, content = drawn
    for path in ("tokenizer", "outputs"):
        remove(Path(path))
    for path, good in FILES.items():
        # A folder is compared with its manifest before its .metadata is read.
        if (path != METADATA or name == CARD) and (path != CARD or name != METADATA):
            put(path, good)
    put(name, content)
    data = "text.txt" if name == "text.txt" else "rows.jsonl"
    words = ("--model.hf_assets_path=tokenizer", f"--training.dataset_path={data}")
    ends("job.toml", "--checkpoint.enable", "--metrics.enable_jsonl", *words)


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 10**9, 2**31 - 1, 2**31, 2**53, 2**63 - 1])
WRITTEN = st.sampled_from(TEXTS).filter(_is_written)
LEAVES = {
    bool: st.booleans(),
    int: NUMBERS,
    float: st.sampled_from([0.0, 5e-324, 1e-8, 0.5, 1.0, 2.0, 1e30, 1.7e308]),
    str: WRITTEN,
    Any: st.booleans() | NUMBERS | WRITTEN,
}


@st.composite
def options(draw):
    """Values of some keys, each of its type."""
    chosen = draw(st.lists(st.sampled_from(sorted(keys())), min_size=1, max_size=4, unique=True))
    return {name: draw(option_values.values_of(keys()[name].hint, LEAVES)) for name in chosen}


def a_job(folder, values):
    tables = tomli.loads(JOB)
    for name, value in values.items():
        *path, last = name.split(".")
        table = tables
        for section in path:
            table = table.setdefault(section, {})
        table[last] = value
    Path("drawn.toml").write_bytes(tomli_w.dumps(tables).encode(errors="surrogateescape"))
    ends("drawn.toml")


a_place = st.tuples(st.sampled_from(PATHS), st.sampled_from(PLACES))
a_file_of_it = st.sampled_from(sorted(FILES)).flatmap(damaged)


def test_the_job_that_is_damaged_is_right(folder):
    assert ends("job.toml", *SWITCHES) == 0
    a_damaged_file(folder, ("text.txt", FILES["text.txt"]))


DRAWN = {
    "job file": (a_file, some_lines, 400, 2000),
    "command line": (a_command_line, st.lists(words(), max_size=3), 350, 2000),
    "hardly a job": (some_bytes, st.binary(max_size=40) | cut, 150, 2000),
    "environment": (an_environment, environments, 150, 2000),
    "path": (a_path, a_place, 80, 300),
    "job": (a_job, options(), 120, 300),
    "damaged file": (a_damaged_file, a_file_of_it, 120, 300),
}
"""The check, the strategy, and the number of examples: in every run, and for each of five seeds in an exhaustive run."""


@pytest.mark.parametrize("seed", [None, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(5))])
@pytest.mark.parametrize("name", DRAWN)
def test_what_is_drawn(folder, name, seed):
    check, strategy, few, many = DRAWN[name]

    @settings(drawing(few if seed is None else many), derandomize=seed is None)
    @given(strategy)
    def drawn(value):
        check(folder, value)

    (drawn if seed is None else hypothesis.seed(seed)(drawn))()
