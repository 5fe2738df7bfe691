"""Any job loads and reads back as itself, or is refused in one line: random keys with random values, in TOML and typed."""

from typing import Literal, get_args, get_origin

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from titanplans.config import ConfigError, load_job
from titanplans.config.schema import keys

WORDS = st.sampled_from(
    ["", "none", "default", "never", "auto", "gla", "true", "-1", "1e3", "a,b", "[1]", "{}", "\n", "é"]
)
PLAIN = st.one_of(
    st.booleans(),
    st.sampled_from([-1, 0, 1, 2, 3, 8, 10**18]),
    st.floats(),
    WORDS,
    st.text(max_size=5),
)
ANY = st.one_of(PLAIN, st.lists(PLAIN, max_size=2), st.dictionaries(st.text(max_size=5), PLAIN, max_size=2))


def choices(hint):
    """Return the words that a type, or a part of it, names."""
    inside = [value for argument in get_args(hint) for value in choices(argument)]
    return list(get_args(hint)) if get_origin(hint) is Literal else inside


def value_of(key):
    """Any value, more often one that may be right."""
    words = [value for value in choices(key.hint) if value is not None]
    likely = [st.just(key.default)] if key.default is not None else []
    likely += [st.sampled_from(words)] if words else []
    return st.one_of(*likely, ANY)


@st.composite
def settings_of_a_job(draw):
    """Return values by dotted key, a few keys of which none has the name."""
    drawn = draw(st.lists(st.sampled_from(sorted(keys())), max_size=6, unique=True))
    values = {name: draw(value_of(keys()[name])) for name in drawn}
    if draw(st.integers(0, 9)) == 0:
        section, _, name = draw(st.sampled_from(sorted(keys()))).rpartition(".")
        values[f"{section}.{name[:-1]}"] = draw(ANY)
    return values


def tables(values):
    """Return the values as nested tables; where a key is a table of another's, the first stays."""
    tree = {}
    for dotted, value in values.items():
        *path, name = dotted.split(".")
        table = tree
        for part in path:
            table = table.setdefault(part, {})
        table.setdefault(name, list(value) if isinstance(value, tuple) else value)
    return tree


def loaded(argv):
    """Return the job, or None where it is refused, in one line."""
    try:
        return load_job(argv)
    except ConfigError as error:
        said = str(error)
    assert said
    assert "\n" not in said
    return None


# A word is echoed as it was typed: one with a line break in it has more than a line.
TYPED = (WORDS | st.text(max_size=5)).filter(lambda word: not word or word.isprintable())
ONE_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)


@ONE_FOLDER
@given(settings_of_a_job())
def test_a_job_file_loads_and_reads_back_or_is_one_line(tmp_path, values):
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tables(values)))
    job = loaded([str(tmp_path / "job.toml")])
    if job is not None:
        (tmp_path / "again.toml").write_text(job.to_toml())
        assert load_job([str(tmp_path / "again.toml")]) == job


@ONE_FOLDER
@given(st.lists(st.tuples(st.sampled_from(sorted(keys())), TYPED), max_size=4))
def test_a_command_line_loads_or_is_one_line(tmp_path, options):
    (tmp_path / "job.toml").write_text("")
    loaded([str(tmp_path / "job.toml"), *(word for key, text in options for word in (f"--{key}", text))])


@pytest.mark.parametrize("text", ["[training", "training = 1", "[[training]]", "a = 1\na = 2", "\x00", "x"])
def test_a_file_that_is_no_job_is_one_line(tmp_path, text):
    (tmp_path / "job.toml").write_text(text)
    assert loaded([str(tmp_path / "job.toml")]) is None
