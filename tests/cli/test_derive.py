"""`titanplans derive`: what it prints, writes and refuses."""

import ast
import json

import pytest
from transformers import ArceeConfig, AutoModelForCausalLM

from titanplans.cli.main import main
from titanplans.modeling import build
from titanplans.plan.kept import kept_plan


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


def test_a_proved_plan_is_kept_for_models_of_its_structure(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = ArceeConfig(hidden_size=256, num_hidden_layers=3, num_attention_heads=16, vocab_size=512)
    config.save_pretrained(tmp_path)
    status, out, err = run(capsys, str(tmp_path), "--keep", "--name", "MyPlan")
    assert status == 0, err
    assert "register_plan" not in out
    kept = kept_plan(build(config))
    assert kept is not None
    assert f"kept in {kept.file}\n" in err
    assert (kept.plan.__name__, kept.plan.mlp_in) == ("MyPlan", ("up_proj",))
    assert out.splitlines()[-1].startswith(f"proved: {kept.proof}; ")
    assert kept.file.read_text().endswith(out[: out.rindex("proved: ")].rstrip("\n") + "\n")
    assert kept_plan(AutoModelForCausalLM.from_config(config)) is not None, "as in a loop of the user's"
    config.tie_word_embeddings = True
    assert kept_plan(build(config)) is None


def test_a_plan_is_not_kept_for_a_model_of_another_structure_than_the_small_one(capsys, tmp_path):
    """The small config has a low rank of queries, which the model does not have."""
    config = {"model_type": "deepseek_v3", "q_lora_rank": None, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, _, err = run(capsys, str(tmp_path), "--keep")
    assert (status, err.count("\n")) == (2, 1)
    assert "lacks a block with self_attn.q_proj: Linear(weight[2]), so a proof with it would not hold" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["exaone9"], "derive exaone9: no such model type; did you mean exaone?"),
        (["nowhere/config.json"], "nowhere/config.json"),
        (["blt"], "no small BltConfig runs: it has 192,557,184 parameters, because"),
        (
            ["gemma4_assistant"],
            "can't be made without arguments: ValueError: hidden_size_per_layer_input must be 0, got 256",
        ),
        (["recurrent_gemma"], "temporal_block (RecurrentGemmaRecurrentBlock) can't be copied"),
        (["arcee", "--name", "my plan"], "--name my plan is not the name of a class"),
        (["no_such_models:build"], "no module named 'no_such_models'"),
        (["arcee", "--keep", "--tp", "2"], "--tp: a job may have any degrees"),
        (
            ["tests.support.tiny_model:Tiny", "--keep"],
            "is a function, and a plan is kept for a model with a config",
        ),
        (["llama", "--other", "my_models:other"], "--other my_models:other: goes with module:function"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
