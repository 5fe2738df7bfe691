"""For each type of option: which TOML values and which command-line texts are accepted, and which are refused."""

from typing import Annotated, Literal

import pytest

from titanplans.config.values import Constraint, FilePath, NormLimit, Strings, describe, from_text, from_toml
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
        (4, Even | None, 4),
        (["x"], tuple[str, ...], ("x",)),
        ({"a.*": "colwise"}, Plan, {"a.*": "colwise"}),
        ("module:Plan", Plan, "module:Plan"),
        ({"a": True, "b": 1, "c": 0.5, "d": "x"}, Settings, {"a": True, "b": 1, "c": 0.5, "d": "x"}),
        (2, Choice | Even, 2),
        ("all-linear", Strings, ("all-linear",)),
        (["a", "b"], Strings, ("a", "b")),
        (0, NormLimit, 0.0),
    ],
)
def test_toml_values_that_fit(value, hint, expected):
    converted = from_toml(value, hint, "key")
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        *((value, int) for value in (True, 1.5, "1", 2**63, [1])),
        *((value, float) for value in (True, "1", float("nan"), float("inf"), 2**63)),
        *((value, str) for value in (1, "\0", "\ud800")),
        (1, bool),
        ("c", Choice),
        (3, Even),
        ("x", tuple[str, ...]),
        (["x"], tuple[Choice, ...]),
        ({"a": 1}, Plan),
        ({"a": [1]}, Settings),
        ({"a": 2**63}, Settings),
        (3, Choice | Even),
        (["x", 1], Strings),
        ('["x"', Strings),
        *((value, NormLimit) for value in (-1.0, float("inf"), "none")),
    ],
)
def test_toml_values_that_do_not_fit_are_refused(value, hint):
    with pytest.raises(ConfigError, match=r"^key = .*: expected "):
        from_toml(value, hint, "key")


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        ("1", int, 1),
        ("-1", int, -1),
        ("3e-4", float, 3e-4),
        (".5", float, 0.5),
        ("2", float, 2.0),
        ("TRUE", bool, True),
        ("2", str, "2"),
        ('"2"', str, '"2"'),
        ("none", int | None, None),
        ("none", str, "none"),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("", tuple[str, ...], ()),
        ("2", tuple[str, ...], ("2",)),
        ('["a"]', tuple[str, ...], ("a",)),
        ("all-linear", Strings, ("all-linear",)),
        ("a,b", Strings, ("a", "b")),
        ("a,b", tuple[Choice, ...], ("a", "b")),
        ('{"a.*" = "colwise"}', Plan, {"a.*": "colwise"}),
        ("module:Plan", Plan, "module:Plan"),
        ("{a = true, b = 2}", Settings, {"a": True, "b": 2}),
        ("4", Choice | Even, 4),
    ],
)
def test_texts_that_fit(text, hint, expected):
    assert from_text(text, hint, "--key") == expected


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        *((text, int) for text in ("1.5", "", "x", "none", "9223372036854775808", "1\nb = 2")),
        *((text, float) for text in ("nan", "inf", "1e400")),
        ("yes", bool),
        ("c", Choice),
        ("3", Even | None),
        ('["a"', tuple[str, ...]),
        ("x", Settings),
    ],
)
def test_texts_that_do_not_fit_are_refused(text, hint):
    with pytest.raises(ConfigError, match=r"(?s)^--key .*: expected "):
        from_text(text, hint, "--key")


@pytest.mark.parametrize(
    ("path", "expected"),
    [("~", "/home/x"), ("~/x", "/home/x/x"), ("$S/x", "/s/x"), ("${S}x/~", "/sx/~"), ("a$", "a$")],
)
def test_home_and_variables_are_expanded_in_a_path(monkeypatch, path, expected):
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("S", "/s")
    assert from_toml(path, FilePath | None, "key") == from_text(path, FilePath, "--key") == expected


@pytest.mark.parametrize("path", ["~nobody-at-all/x", "$NOT_SET/x", "", " ", "a\0b", "\udcff"])
def test_a_path_that_can_not_be_expanded_is_refused(path):
    with pytest.raises(ConfigError):
        from_toml(path, FilePath | None, "key")


def test_the_description_of_a_type():
    assert describe(Even | None) == "an integer, even"
