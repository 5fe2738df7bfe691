"""Options and jobs are read back from their dict and TOML, or refused with an error that names an option."""

import tomllib
from types import NoneType
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.support import option_values
from titanplans.config import (
    ActivationCheckpoint,
    Compile,
    DDPConfig,
    Float8,
    FSDP2Config,
    MegatronFSDPConfig,
    OptionError,
    read_strategy,
    write_strategy,
)
from titanplans.config.lines import KeyInFile
from titanplans.config.options import options_of
from titanplans.config.schema import build_job, keys
from titanplans.config.translate import ParsedKeys
from titanplans.config.values import Mismatch, fit

STRATEGIES = [FSDP2Config, DDPConfig, MegatronFSDPConfig]
GROUPS = [*STRATEGIES, ActivationCheckpoint, Compile, Float8]

WORDS = st.sampled_from(
    ["", "none", "default", "never", "auto", "gla", "true", "-1", "1e3", "a,b", "[1]", "{}", "\n", "é"]
)


def fits(value, hint):
    try:
        fit(value, hint)
    except (Mismatch, OptionError):
        return False
    return True


NUMBERS = st.lists(st.sampled_from([1.0, 2.5]), max_size=2).map(tuple)
LEAVES = {
    NoneType: st.none(),
    bool: st.booleans(),
    int: st.integers(-1, 9) | st.integers(0),
    float: st.floats(0, 1) | st.floats(0),
    str: st.text().filter(lambda text: text != "fla"),  # in flame's files "fla" means that no name is set
    Any: st.one_of(st.booleans(), st.sampled_from([0, 8]), WORDS, NUMBERS),
}


def constrained(hint, values):
    base = st.sampled_from(["op", "1", "12"]) if get_args(hint)[0] is str else values
    return base.filter(lambda value: fits(value, hint))


def values_of(hint):
    """Return a strategy for those values of type `hint` that TOML can express."""
    return option_values.values_of(hint, LEAVES, constrained)


@pytest.mark.parametrize("cls", GROUPS)
def test_options_are_read_back_from_a_dict_and_from_toml(cls):
    switches = {Compile: {"enable": True}, Float8: {"recipe_name": "tensorwise"}}.get(cls, {})

    @given(values_of(cls))
    def check(drawn):
        try:
            options = cls(**switches | drawn)
        except OptionError:
            assume(False)
        assert cls(**options.to_dict()) == options
        assert cls(**tomllib.loads(options.to_toml())) == options
        if cls in STRATEGIES:
            assert read_strategy(write_strategy(options)) == options
            assert read_strategy({"strategy": cls.title, **options.to_dict()}) == options

    settings(suppress_health_check=[HealthCheck.filter_too_much])(check)()


@pytest.mark.parametrize("cls", GROUPS)
def test_none_is_only_a_default(cls):
    """TOML has no None, so None may only be a default."""
    for field in options_of(cls):
        assert field.doc
        assert NoneType not in get_args(field.hint) or field.default is None, field.name


@given(data=st.data(), chosen=st.lists(st.sampled_from(sorted(keys())), unique=True, min_size=1, max_size=6))
def test_any_job_is_read_back_from_its_toml_or_refused_by_option(data, chosen):
    values = {name: data.draw(values_of(keys()[name].hint), label=name) for name in chosen}
    try:
        job = build_job(values)
    except OptionError as error:
        names = error.option.split(
            "."
        )  # the name of a key; for a list of tables, the name of an option may follow
        assert {".".join(names[:n]) for n in (2, 3, len(names))} & set(keys())
        return
    parsed = ParsedKeys()
    parsed.add_tables(tomllib.loads(job.to_toml()), KeyInFile("job.toml"))
    assert build_job(parsed.values) == job
    assert parsed.notes == []
