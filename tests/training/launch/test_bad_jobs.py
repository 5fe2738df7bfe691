"""Bad jobs end in one line with exit status 2, before a process starts, and leave no files.

Keys and types come from the declared options, so new options are drawn too. Every run draws the same values;
`make test-exhaustive` draws more.
"""

import contextlib
import io
import json
import logging
import os
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
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def drawing(count):
    """Return settings for `count` examples, the same in every run."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=count, derandomize=True, database=None, suppress_health_check=checks)


@pytest.fixture
def folder(tmp_path, tmp_path_factory, monkeypatch):
    """Return a folder with a correct job, which is the current folder; jobs in it are checked but not started."""
    import datasets
    import huggingface_hub

    for library in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(library, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    monkeypatch.setattr(rank, "run_rank", lambda job: 0)
    # A fork of this process would crash, because other tests started threads.
    monkeypatch.setattr(launch, "launch", lambda *job: 0)
    # The lock creates the job's folders, which a correct job would leave.
    monkeypatch.setattr(outputs, "locked", lambda job: contextlib.nullcontext())
    monkeypatch.chdir(tmp_path)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    Path("job.toml").write_text(JOB)
    Path("gla.json").write_text(json.dumps(GLA))
    Path("text.txt").write_text("the quick brown fox\n" * 10_000)
    Path("empty").mkdir()
    Path("binary").write_bytes(bytes(range(256)))
    return tmp_path


def check_end(*arguments):
    """Run `titanplans train` up to the start of ranks; check its output and the folder; return the exit status."""
    root, before = logging.getLogger(), files()
    handlers, level = root.handlers[:], root.level
    environment = dict(os.environ)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["train", *arguments])
    except SystemExit as ended:
        status = ended.code
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        os.environ.clear()
        os.environ.update(environment)
    message = err.getvalue()
    assert status in (0, 2), message
    if status == 0:
        assert message == ""
    else:
        assert message.startswith("error: ")
        assert len(message.splitlines()) == 1
        assert message[:-1].isprintable()
        assert len(message) < 3000
    assert files() == before
    return status


def files():
    return sorted(str(path) for path in Path().rglob("*"))


def check_load(*arguments):
    """Do what `check_end` does with `--print-config`: the job is parsed, but not checked against machine, data and model."""
    before = time.process_time()
    status = check_end(*arguments, "--print-config")
    # A garbage collection may take seconds, but parsing that is quadratic in a long value takes minutes.
    assert time.process_time() - before < 10
    return status


TEXTS = [
    "", " ", "none", "-1", "0", "1", "2", "nan", "inf", "1e400", "1e308", "true", "True", "no", "0x1f", "1_0",
    "9223372036854775808", "--help", "-h", "=", ",", "a,b", "[]", "[1]", "{}", "{a=1}", "a:b", "$NOT_SET/x", "/", "..",
    "x" * 300, "é", "auto", "default",
]  # fmt: skip
LITERALS = [
    "0", "-1", "1", "2", "3.0", "nan", "inf", "1e308", "9223372036854775808", "true", "false", "[]", "[[]]", "[1]", '["a"]',
    '["a", 1]', "[{}]", "{}", "{a = 1}", '{a = "b"}', "1979-05-27", "'", '"', "", "_",
]  # fmt: skip
KEYS = sorted({*keys(), *RENAMED, *REFUSED, *PENDING, CONVERTERS})
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS})
LETTERS = st.characters(codec="utf-8", exclude_categories=("C",))
text = st.sampled_from(TEXTS) | st.text(LETTERS, max_size=8)
literal = st.sampled_from(LITERALS) | text.map(lambda value: json.dumps(value, ensure_ascii=False))


def nearly(word):
    """Return a strategy that draws `word` or a misspelling of it."""
    return st.sampled_from(
        [word, word, word, word, word[:-1], word + ".x", word.upper(), f"{word} ", f'"{word}"']
    )


key = st.sampled_from(KEYS).flatmap(nearly) | st.sampled_from(SECTIONS) | st.just("")


@st.composite
def toml_lines(draw):
    """Draw lines of TOML with one key: dotted, in its section, as a section, as an array of sections, or twice."""
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
    """Draw the arguments of a command line with one option."""
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


def load_job_file(folder, lines):
    Path("drawn.toml").write_text("\n".join(lines))
    check_load("drawn.toml")


def load_command_line(folder, drawn):
    check_load("job.toml", *(word for option in drawn for word in option))


@pytest.mark.parametrize("path", ["empty", "binary", "missing.toml", "job.toml/x"])
def test_a_path_without_a_job_is_refused(folder, path):
    assert check_load(path) == check_load("--job.config_file", path) == 2


ONCE_WRONG = [
    ["--training.steps", "--help"],
    ["--training.steps=--help"],
    ["--training.steps", "--print-config"],
    ["--training.steps"],
    ["--model.name="],
    ["--comm.init_timeout_seconds", "99999999999"],
    ["--comm.save_traces_file_prefix", "a/b"],
    ["--training.steps", "9223372036854775808"],
    ["--optimizer.lr", "inf"],
    ["--optimizer.eps", "nan"],
    ["--job.dump_folder="],
    ["--job.dump_folder", "$NOT_SET"],
    ["--training.steps", "a\nb"],
]
"""Command lines that once did not end in one error line."""


@pytest.mark.parametrize("arguments", ONCE_WRONG)
def test_command_lines_that_once_ended_otherwise(folder, arguments):
    assert check_load("job.toml", *arguments) == 2


NUMBERS = st.sampled_from([-1, 0, 1, 2, 3, 7, 64, 10**9, 2**31 - 1, 2**31, 2**53, 2**63 - 1])
LEAVES = {
    bool: st.booleans(),
    int: NUMBERS,
    float: st.sampled_from([0.0, 5e-324, 1e-8, 0.5, 1.0, 2.0, 1e30, 1.7e308]),
    str: st.sampled_from(TEXTS),
    Any: st.booleans() | NUMBERS | st.sampled_from(TEXTS),
}


@st.composite
def options(draw):
    """Draw values of some keys, each of its type."""
    chosen = draw(st.lists(st.sampled_from(sorted(keys())), min_size=1, max_size=4, unique=True))
    return {name: draw(option_values.values_of(keys()[name].hint, LEAVES)) for name in chosen}


def check_job_file(folder, values):
    tables = tomli.loads(JOB)
    for name, value in values.items():
        *path, last = name.split(".")
        table = tables
        for section in path:
            table = table.setdefault(section, {})
        table[last] = value
    Path("drawn.toml").write_text(tomli_w.dumps(tables))
    check_end("drawn.toml")


def test_the_unchanged_job_is_correct(folder):
    assert check_end("job.toml") == 0


DRAWN = {
    "job file": (load_job_file, st.lists(toml_lines(), max_size=3), 400, 2000),
    "command line": (load_command_line, st.lists(words(), max_size=3), 350, 2000),
    "values of each type": (check_job_file, options(), 120, 300),
}
"""Check, strategy, number of examples in every run, and number for each of five seeds in an exhaustive run."""


@pytest.mark.parametrize("seed", [None, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(5))])
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_jobs_end_in_one_line(folder, name, seed):
    check, strategy, few, many = DRAWN[name]

    @settings(drawing(few if seed is None else many), derandomize=seed is None)
    @given(strategy)
    def drawn(value):
        check(folder, value)

    (drawn if seed is None else hypothesis.seed(seed)(drawn))()
