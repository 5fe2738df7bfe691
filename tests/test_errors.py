"""The one-line message and the attributes of each class of errors."""

import inspect

import pytest
from torch import nn

from titanplans import errors
from titanplans.errors import OptionError, PlanError, RunError, UserError, as_line
from titanplans.styles.colwise import Colwise

RENDERED = {
    PlanError: (
        PlanError("expects a Linear; remove it", key="norm", style=Colwise(), module=nn.LayerNorm(2)),
        "plan key 'norm' (Colwise on LayerNorm): expects a Linear; remove it",
    ),
    OptionError: (
        OptionError("checkpoint.interval", 0, "an integer, at least 1", "job.toml, line 3"),
        "job.toml, line 3: checkpoint.interval = 0: an integer, at least 1",
    ),
}
PLAIN = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, (UserError, RunError)) and kind not in RENDERED
]


@pytest.mark.parametrize("kind", RENDERED)
def test_an_error_with_fields_has_them_in_one_line(kind):
    error, line = RENDERED[kind]
    assert str(error) == line


@pytest.mark.parametrize("kind", PLAIN)
def test_an_error_without_fields_is_its_message(kind):
    assert str(kind("the disk is full; free some")) == "the disk is full; free some"


def test_an_option_keeps_its_value_and_reason_under_another_name():
    error = OptionError("compile.mode", "fast", "no such mode").renamed("job.compile.mode")
    assert (error.option, error.value, error.reason) == ("job.compile.mode", "fast", "no such mode")
    assert str(error) == 'job.compile.mode = "fast": no such mode'


def test_an_error_of_a_plan_without_a_key_is_its_reason():
    error = PlanError("two plans claim gla")
    assert (error.key, error.reason, str(error)) == (None, "two plans claim gla", "two plans claim gla")


def test_a_message_is_printed_on_one_line_and_truncated_if_huge():
    assert as_line("a\n  b\x1b[31m") == "a b\\x1b[31m"
    line = as_line("x" * 5000)
    assert len(line) < 2100
    assert "... (5,000 characters) ..." in line
