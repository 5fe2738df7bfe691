"""`titanplans derive`: what it prints, writes and refuses."""

import ast

import pytest

from titanplans.cli.main import main


def run(capsys, *arguments):
    status = main(["derive", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_type_without_a_plan_gets_one_that_is_proved(capsys, tmp_path):
    file = tmp_path / "plan.py"
    status, out, err = run(capsys, "arcee", "--tp", "2", "--output", str(file))
    assert status == 0, err
    assert file.read_text() == out[: out.rindex("proved: ")].rstrip("\n") + "\n"
    lines = [
        "from titanplans import register_plan",
        "from titanplans.plans.hf.llama import LlamaPlan",
        "",
        "",
        '@register_plan("arcee")',
        "class ArceePlan(LlamaPlan):",
        '    """Derived from the dataflow of ArceeForCausalLM."""',
        "",
        '    mlp_in = ("up_proj",)',
    ]
    assert file.read_text().splitlines() == lines
    ast.parse(file.read_text())
    assert out.splitlines()[-1].startswith("proved: ")
    assert run(capsys, "arcee", "--output", str(file))[0] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exaone9"], "derive exaone9: no such model type; did you mean exaone?"),
        (["nowhere/config.json"], "nowhere/config.json"),
        (["arcee", "--name", "my plan"], "--name my plan is not the name of a class"),
        (["no_such_models:build"], "no module named 'no_such_models'"),
        (["llama", "--other", "my_models:other"], "--other my_models:other: goes with module:function"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
