"""Types of configuration values: what TOML and the command line may say for each, and what is said of the rest."""

from typing import Annotated, Literal

import pytest

from titanplans.config.values import Constraint, describe, from_text, from_toml
from titanplans.errors import ConfigError

Even = Annotated[int, Constraint("even", lambda value: value % 2 == 0)]
Choice = Literal["a", "b"]
Plan = dict[str, str] | str | None
Settings = dict[str, bool | int | float | str] | None


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, int, 1),
        (1, float, 1.0),
        (True, bool, True),
        ("a", Choice, "a"),
        (4, Even, 4),
        (4, Even | None, 4),
        (["x"], tuple[str, ...], ("x",)),
        ({"a.*": "colwise"}, Plan, {"a.*": "colwise"}),
        ("module:Plan", Plan, "module:Plan"),
        ({"a": True, "b": 1, "c": 0.5, "d": "x"}, Settings, {"a": True, "b": 1, "c": 0.5, "d": "x"}),
        (2, Choice | Even, 2),
    ],
)
def test_toml_values_that_fit(value, hint, expected):
    converted = from_toml(value, hint, "key")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        (True, int, "key = true: expected an integer"),
        (1, bool, "key = 1: expected true or false"),
        (1.5, int, "key = 1.5: expected an integer"),
        ("1", int, 'key = "1": expected an integer'),
        (1, str, "key = 1: expected a string"),
        ("c", Choice, 'key = "c": expected one of "a", "b"'),
        (3, Even, "key = 3: expected an integer, even"),
        ("x", tuple[str, ...], 'key = "x": expected a list of strings'),
        (["x"], tuple[Choice, ...], 'key = ["x"]: expected a list of "a", "b"'),
        ({"a": 1}, Plan, 'key = {"a" = 1}: expected a table of strings or a string'),
        (
            {"a": [1]},
            Settings,
            'key = {"a" = [1]}: expected a table, each value true or false or an integer or a number or a string',
        ),
        (3, Choice | Even, 'key = 3: expected one of "a", "b" or an integer, even'),
    ],
)
def test_toml_values_that_do_not(value, hint, message):
    with pytest.raises(ConfigError) as caught:
        from_toml(value, hint, "key")
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        ("1", int, 1),
        ("-1", int, -1),
        ("3e-4", float, 3e-4),
        ("2", float, 2.0),
        ("TRUE", bool, True),
        ("2", str, "2"),
        ("none", int | None, None),
        ("4", Even | None, 4),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("", tuple[str, ...], ()),
        ('["a"]', tuple[str, ...], ("a",)),
        ("model,loss", tuple[Literal["model", "loss"], ...], ("model", "loss")),
        ('{"a.*" = "colwise"}', Plan, {"a.*": "colwise"}),
        ("module:Plan", Plan, "module:Plan"),
        ("{a = true, b = 2}", Settings, {"a": True, "b": 2}),
        ("true", bool | None, True),
        ("4", Choice | Even, 4),
    ],
)
def test_words_that_fit(text, hint, expected):
    assert from_text(text, hint, "--key") == expected


@pytest.mark.parametrize(
    ("text", "hint", "message"),
    [
        ("1.5", int, "--key 1.5: expected an integer"),
        ("yes", bool, "--key yes: expected true or false"),
        ("c", Choice, '--key c: expected one of "a", "b"'),
        ("3", Even | None, "--key 3: expected an integer, even"),
        ('["a"', tuple[str, ...], '--key ["a": expected a list of strings'),
    ],
)
def test_words_that_do_not(text, hint, message):
    with pytest.raises(ConfigError) as caught:
        from_text(text, hint, "--key")
    assert str(caught.value) == message


def test_a_type_says_what_it_takes():
    assert describe(Even | None) == "an integer, even"
