"""`titanplans verify` in this process: every kind of subject, and errors."""

import dataclasses
import json
import logging
import os
import re
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.releases import needs_torch_2_13
from titanplans.cli.main import main
from titanplans.cli.verify.screen import progress
from titanplans.proof.batches.conditions import MicroBatch

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 101,
}
OPT = dict(
    model_type="opt",
    vocab_size=96,
    hidden_size=64,
    word_embed_proj_dim=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    ffn_dim=48,
)
OWN = """
from types import SimpleNamespace
from titanplans import TPPlan, register_plan
from titanplans.plans.hf.qwen import Qwen3Plan
from titanplans import modeling

class Unregistered(Qwen3Plan):
    pass

class Whole(TPPlan):
    def attn_plan(self, attn):
        return self.unsplit(attn)

def rebased():
    from fla.layers.rebased import ReBasedLinearAttention
    from fla.models import GLAConfig, GLAForCausalLM

    sizes = dict(hidden_size=64, num_hidden_layers=1, num_heads=4, vocab_size=64, fuse_cross_entropy=False)
    model = GLAForCausalLM(GLAConfig(**sizes))
    model.model.layers[0].attn = ReBasedLinearAttention(64, num_heads=4)
    return model

DICT = {"lm_head": "vocab_head"}

NO_BLOCKS = {
    "embed": "vocab_embedding",
    "mlp": "mlp_input",
    "mlp.up": "colwise",
    "mlp.down": "rowwise",
    "head": "vocab_head",
}

def no_blocks():
    from torch import nn

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.down(self.up(x).relu())

    parts = {"embed": nn.Embedding(30, 8), "mlp": MLP(), "head": nn.Linear(8, 30, bias=False)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    model.config = SimpleNamespace(vocab_size=30)
    return model

def small():
    return modeling.build_real(modeling.load_config("qwen3", "debug", num_hidden_layers=1))

def on_meta():
    return modeling.build(modeling.load_config("qwen3", "debug"))

def three():
    return 3

def failing():
    return {}["weights"]

class Typo(Qwen3Plan):
    def attn_plan(self, attn):
        return {"q_norm": self.replicatd()}

class NoReturn(Qwen3Plan):
    def attn_plan(self, attn):
        super().attn_plan(attn)

class NoOptions(Qwen3Plan):
    def __init__(self):
        pass
"""
LAYOUTS = ("sharded", "replicated")
ONE_CASE = ("--tp", "2", "--loss-parallel", "--sequence-parallel")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Make a folder of a user the current folder, put it on sys.path as `python -m` does, and return it."""
    (tmp_path / "qwen3.json").write_text(json.dumps(QWEN3))
    (tmp_path / "opt.json").write_text(json.dumps(OPT))
    (tmp_path / "own_plans_of_test_verify.py").write_text(OWN)
    (tmp_path / "degree_1.toml").write_text('[model]\nconfig = "qwen3.json"\n')
    (tmp_path / "broken_syntax.py").write_text("def f(:")
    (tmp_path / "broken_name.py").write_text("x = 1\ny = undefined\n")
    (tmp_path / "broken_import.py").write_text("import no_such_thing\n")
    (tmp_path / "broken_driver.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def command(folder, capsys, monkeypatch):
    """Return a function that runs the command and returns status, stdout and stderr; logging is restored afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        status = main(list(arguments))
        return status, *capsys.readouterr()

    yield call
    root.handlers[:] = handlers
    root.setLevel(level)


@needs_torch_2_13("torchtitan is not used before it")
def test_without_torchtitan_its_loss_is_skipped_and_jobs_are_refused(command, monkeypatch, capsys):
    from titanplans.training.launch.main import main as train

    monkeypatch.setitem(sys.modules, "torchtitan", None)  # as if it were not installed
    status, out, err = command("verify", "qwen3.json", "--layers", "1", "--quick", *ONE_CASE)
    assert (status, err) == (0, "")
    assert "\n  torchtitan's loss is not compared: a job needs torchtitan, which is not installed\n" in out
    assert "torchtitan loss" not in out
    assert train([str(ROOT / "configs" / "gla_debug.toml")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(
        "error: a job needs torchtitan, which is not installed: pip install 'titanplans[train]', in a clone '.[train]', or"
    )
    assert message.count("\n") == 1


def test_the_full_grid_as_text(command):
    status, out, err = command("verify", "qwen3.json", "--layers", "1")
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "qwen3.json"
    assert "layers 1, num attention heads 4, num key value heads 2, vocabulary 101, hidden 32" in lines[1]
    assert lines[2:5] == [
        "  2 sequences of 16 tokens, ranks: threads",
        "  plan: registered Qwen3Plan (plans/hf/qwen.py)",
        "  the first 1 of 3 blocks",
    ]
    lines_of_cases = [line.split()[:4] for line in lines if line.lstrip()[:1].isdigit() and " right " in line]
    lines_of_cases = [
        line_of_case
        for at, line_of_case in enumerate(lines_of_cases)
        if line_of_case not in lines_of_cases[:at]
    ]
    choices = [[loss, sequence] for loss in LAYOUTS for sequence in LAYOUTS]
    # At degree 4 ranks share key/value heads. Without TP, the options of TP have no effect.
    by_weights = [[tp, cp, *c] for tp, cp in (("2", "1"), ("4", "1"), ("2", "2")) for c in choices]
    assert sorted(lines_of_cases) == sorted([*by_weights, ["1", "2", "sharded", "sharded"]])
    assert "not proved: tp 8: tensor_parallel_degree = 8 does not divide num_attention_heads = 4" in out
    assert "1 x Qwen3DecoderLayer (Qwen3Attention, Qwen3MLP)" in out
    assert "2 all-gather, 2 reduce-scatter  2 all-gather, 2 reduce-scatter" in out
    assert "collectives, tp 2, loss replicated, sequence replicated: no more than is needed" in out
    assert re.match("proved: 2. cases, worst ", lines[-1])
    assert "; 1 refusal above; " in lines[-1]


@needs_torch_2_13("a note says that torchtitan's loss is not compared")
def test_json_is_one_object(command):
    status, out, err = command("verify", "qwen3.json", "--json", *ONE_CASE)
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert (result["verdict"], result["subject"], result["ranks"]) == (
        "proved",
        "qwen3.json",
        "ranks: threads",
    )
    assert result["sizes"]["layers"] == 2
    assert result["notes"] == [
        "the first 2 of 3 blocks: the others have the same classes, shapes, settings and plan (--layers)"
    ]
    cases = result["report"]["cases"]
    assert all(case["passed"] for case in cases)
    case = cases[0]
    assert case["scenario"]["steps"][0][0] == dataclasses.asdict(MicroBatch())
    assert {"loss", "torchtitan loss"} < {check["what"] for check in case["checks"]}
    (counted,) = result["communication"]
    assert (counted["tp"], counted["sequence_parallel"], counted["minimal"]) == (2, True, True)


def test_a_job_is_proved_as_it_is_split(command, folder):
    (folder / "job.toml").write_text(
        '[model]\nconfig = "qwen3.json"\nplan = "own_plans_of_test_verify:Unregistered"\n'
        "[parallelism]\ntensor_parallel_degree = 4\ndisable_loss_parallel = true\n"
        '[experimental]\ncustom_import = "own_plans_of_test_verify"\n'
    )
    status, out, _ = command("verify", "job.toml", "--json", "--layers", "1", "--quick")
    result = json.loads(out)
    case, _ = result["report"]["cases"]
    assert status == 0
    assert (case["tp"], case["loss_parallel"], case["sequence_parallel"]) == (4, False, True)
    assert result["report"]["subject"] == "Qwen3ForCausalLM, Unregistered"
    # Flags come before the job.
    _, out, _ = command(
        "verify", "job.toml", "--json", "--layers", "1", "--tp", "2", "--no-sequence-parallel", "--quick"
    )
    case, _ = json.loads(out)["report"]["cases"]
    assert (case["tp"], case["loss_parallel"], case["sequence_parallel"]) == (2, False, False)


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (("titanplans.plans.hf.qwen:Qwen2Plan", "--layers", "1"), "qwen2, flavor debug"),
        (("own_plans_of_test_verify:Unregistered", "--model", "qwen3.json", "--layers", "1"), "qwen3.json"),
        (
            ("own_plans_of_test_verify:Unregistered", "--model", "own_plans_of_test_verify:small"),
            "own_plans_of_test_verify:small",
        ),
        (
            ("own_plans_of_test_verify:Unregistered", "--model", "qwen3", "--layers", "1"),
            "qwen3, flavor debug",
        ),
    ],
)
def test_the_model_of_a_plan(command, arguments, model):
    status, out, err = command("verify", *arguments, "--quick", *ONE_CASE)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == model


def test_a_dict_plan_for_a_model_of_unknown_structure(command):
    arguments = (f"{OURS}:NO_BLOCKS", "--model", f"{OURS}:no_blocks", "--no-sequence-parallel")
    status, out, err = command("verify", *arguments)
    assert (status, err) == (0, "")
    assert "collectives are not counted: there is no list of blocks" in out
    # degree 8 is missing, because a width of 12 leaves some of 8 ranks without a shard
    assert out.splitlines()[-1].startswith("proved: 14 cases")


def test_the_length_has_room_for_images(command):
    status, out, _ = command("verify", "gemma3", "--quick", *ONE_CASE)
    assert status == 0
    assert "Gemma3ForConditionalGeneration, Gemma3VisionPlan" in out
    assert "2 sequences of 16 tokens" in out


def test_a_proof_in_float32(command):
    status, out, _ = command(
        "verify", "qwen3.json", "--dtype", "float32", "--layers", "1", "--seq-len", "5", "--quick", *ONE_CASE
    )
    assert status == 0
    assert "Qwen3ForCausalLM, Qwen3Plan, float32" in out
    assert "2 sequences of 5 tokens" in out


def test_list_has_plans_model_types_mixers_and_their_heads(command):
    status, out, _ = command("list")
    assert status == 0
    (row,) = [line.split() for line in out.splitlines() if "GLAPlan" in line]
    assert row == ["titanplans.plans.fla.gla:GLAPlan", "fla.layers.gla.GatedLinearAttention", "heads", "gla"]
    assert "granite, helium" in out
    cells = [re.split(r" {2,}", line) for line in out.splitlines()[1:-1]]
    by = {plan.rpartition(":")[2]: split_by for plan, _, split_by, _ in cells}
    assert by["HGRNPlan"] == "input_dim"  # channels
    assert [name for name, split_by in by.items() if split_by == "nothing"] == ["BitNetPlan"]  # replicated


def test_list_of_a_model_type_has_what_is_split_of_each_mixer(command):
    status, out, _ = command("list", "gla", "bitnet", "qwen3_next")
    assert status == 0
    lines = out.splitlines()
    assert lines[0].startswith("gla: plans/fla/gla.py, ")
    assert lines[1].startswith("  GatedLinearAttention: split by 'num_heads'")
    assert "ranks may share heads of: 'k_proj', 'v_proj', 'gk_proj.1'" in lines[1]
    assert "  BitAttention: split by nothing: replicated on every rank" in lines
    mixers = [line.partition(";")[0] for line in lines[-3:-1]]
    assert mixers == [
        "  Qwen3NextGatedDeltaNet: split by 'num_k_heads'",
        "  Qwen3NextAttention: split by 'num_attention_heads', 'num_key_value_heads'",
    ]


def test_progress_is_one_line_in_a_terminal(monkeypatch):
    master, slave = os.openpty()
    with open(slave, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("COLUMNS", "20")
        with progress("gla", shown=True) as tell:
            tell("tp = 2, loss parallel on")
        with progress("gla", shown=False) as tell:  # as on ranks other than 0
            tell("tp = 4")
        expected = b"\r\x1b[Kgla: tp = 2, loss p\r\x1b[K"
        shown = b""
        while len(shown) < len(expected):  # a terminal may return the output in pieces
            shown += os.read(master, 1000)
        assert shown == expected
    os.close(master)


OURS = "own_plans_of_test_verify"
REFUSED = {
    "a name that is no path": (("verify", "x" * 5000), "; for any other Hugging Face model give its config.json"),
    "a folder for the output": (("verify", "gla", "--output", "."), "--output .: Is a directory"),
    "an output in no folder": (("verify", "gla", "--output", "no/x"), "--output no/x: No such file or directory"),
    "no subject": (("verify",), "one of the arguments SUBJECT --all is required"),
    "subject and all": (("verify", "gla", "--all"), "--all: not allowed with argument SUBJECT"),
    "all with a flavor": (("verify", "--all", "--flavor", "1B"), "--flavor 1B: goes with one SUBJECT"),
    "no job": (("verify", "no.toml"), "no.toml: no such job file"),
    "no config": (("verify", "no.json"), "'no.json' can't be read: No such file"),
    "flavor of a config": (("verify", "qwen3.json", "--flavor", "1B"), "--flavor 1B: goes with a named model"),
    "model of a model": (("verify", "gla", "--model", "qwen3"), "--model qwen3: goes with a plan"),
    "degree 0": (("verify", "gla", "--tp", "0"), "'0' is not a list of degrees above 0"),
    "degree x": (("verify", "gla", "--tp", "2,x"), "'2,x' is not a list of degrees above 0"),
    "degree and heads": (("verify", "gla", "--tp", "2,3"), "tensor_parallel_degree = 3 does not divide num_heads = 8"),
    "sequence": (("verify", "gla", "--seq-len", "0"), "'0' is not a number above 0"),
    "dtype": (("verify", "gla", "--dtype", "bfloat16"), "invalid choice: 'bfloat16'"),
    "float8": (("verify", "gla", "--float8", "fp4"), "invalid choice: 'fp4'"),
    "a filter of nothing": (("verify", "gla", "--float8-filter", "lm_head"), "--float8-filter: no module is converted"),
    "a filter that matches nothing": (
        ("verify", "gla", "--float8", "rowwise", "--float8-filter", "output"), "'output' is part of no",
    ),
    "a size that float8 can't multiply": (
        ("verify", "llama", "--float8", "rowwise", "--vocab-size", "100"), "lm_head (Linear, 100 out)",
    ),
    "float8 in float32": (
        ("verify", "llama", "--float8", "rowwise", "--dtype", "float32"), "can't be compared: use torch.float64",
    ),
    "degree 1 of a job": (("verify", "degree_1.toml"), "degree_1.toml: tensor_parallel_degree = 1 splits nothing"),
    "layers": (("verify", "gla", "--layers", "5"), "--layers 5: gla, flavor debug has 4 blocks"),
    "no attribute": (
        ("verify", "titanplans.plans.hf.qwen:Qwen4Plan"),
        "module titanplans.plans.hf.qwen has no Qwen4Plan; did you mean Qwen3Plan? (",
    ),
    "no attribute like it": (
        ("verify", "titanplans.plans.hf.qwen:Zebra"), "module titanplans.plans.hf.qwen has no Zebra; it has ",
    ),
    "no name": (("verify", "titanplans.plans.hf.qwen:"), "write module:attribute"),
    "syntax": (("verify", "broken_syntax:Plan"), "can't be imported: SyntaxError"),
    "import fails": (("verify", "broken_name:Plan", "--model", "gla"), "broken_name.py, line 2)"),
    "import raises": (("verify", "broken_driver:Plan"), "RuntimeError: no driver ("),
    "imports what is not there": (("verify", "broken_import:Plan", "--model", "gla"), "broken_import.py, line 1)"),
    "a typo in a plan": (
        ("verify", f"{OURS}:Typo", "--model", "qwen3"),
        "plan Typo: AttributeError: 'Typo' object has no attribute 'replicatd' (",
    ),
    "a plan without return": (
        ("verify", f"{OURS}:NoReturn", "--model", "qwen3"), "the plan of self_attn is None, not a dict",
    ),
    "a plan without options": (
        ("verify", f"{OURS}:NoOptions", "--model", "qwen3"), "NoOptions can't be created with its options: "
            "TypeError",
    ),
    "a model that raises": (("verify", f"{OURS}:Unregistered", "--model", f"{OURS}:failing"), "KeyError: 'weights'"),
    "no plan": (("verify", f"{OURS}:small"), "neither a TPPlan class nor a dict"),
    "registered for no model": (("verify", f"{OURS}:Unregistered"), "for no named model: name the model with --model"),
    "registered for two": (
        ("verify", "titanplans.plans.hf.llama:LlamaPlan"), "is registered for cohere and cohere2 and ",
    ),
    "incomplete": (("verify", f"{OURS}:DICT", "--model", "qwen3"), "are covered by no key of DictPlan"),
    "no registered plan": (("verify", "opt.json"), "no plan is registered for OPTForCausalLM"),
    "GPU kernel": (
        ("verify", f"{OURS}:Whole", "--model", f"{OURS}:rebased"),
        "titanplans verify ... --device cuda",
    ),
    "a device for processes": (
        ("verify", "gla", "--device", "cuda", "--process-group"),
        "--device cuda: only for ranks that are threads; each rank of a process group",
    ),
    "no model": (("verify", f"{OURS}:Unregistered", "--model", f"{OURS}:three"), "an object of type int, not an nn.Module"),
    "model on meta": (("verify", f"{OURS}:Unregistered", "--model", f"{OURS}:on_meta"), "is on meta): initialize it"),
    "layers of a function": (
        ("verify", f"{OURS}:Unregistered", "--model", f"{OURS}:small", "--layers", "1"), "returns a model of a fixed size",
    ),
    "memory": (
        ("verify", "llama", "--flavor", "3.1-70B", "--layers", "80", "--vocab-size", "128256"),
        "of 8 threads, needs more than 7,902.0 GB",
    ),
    "no torchrun": (
        ("verify", "gla", "--process-group", "--tp", "4"),
        "torchrun --nproc-per-node 4 -m titanplans verify gla --process-group --tp 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_errors_are_one_line_with_status_2(command, case):
    arguments, message = REFUSED[case]
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        ("2", (), "--nproc-per-node 2 -m titanplans verify gla --process-group"),
        ("2", ("--process-group", "--tp", "4"), "tp 4: torchrun started 2 processes"),
        ("1", ("--process-group",), "--process-group: torchrun started 1 processes"),
    ],
)
def test_a_launch_that_does_not_fit_is_refused(command, monkeypatch, size, arguments, message):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    status, out, err = command("verify", "gla", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err
