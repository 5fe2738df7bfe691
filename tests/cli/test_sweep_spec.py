"""The sweep file and its cells: reading, the jobs of the cells, and errors before anything runs."""

import textwrap

import pytest
import said

from titanplans.cli.main import main
from titanplans.cli.sweep.cells import make_cells, refusal
from titanplans.cli.sweep.spec import read_spec
from titanplans.config import ConfigError

BASE = """
[model]
name = "gla"
flavor = "debug"
[training]
seq_len = 64
steps = 10
[debug]
seed = 1
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a sweep file beside its base job, and returns its path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(BASE)

    def write(text: str, head: str = '[sweep]\nbase = "base.toml"\n') -> str:
        (tmp_path / "sweep.toml").write_text(head + textwrap.dedent(text), encoding="utf-8")
        return "sweep.toml"

    return write


def cells_of(path: str):
    return make_cells(read_spec(path))


def refused(path: str) -> str:
    line = said.refusal(cells_of, path, kind=ConfigError)
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


# ---------------------------------------------------------------- what is read


def test_a_grid_is_a_product_and_named_cells_follow(write):
    cells = cells_of(
        write("""
        [set.training]
        steps = 5
        [grid]
        parallelism.tensor_parallel_degree = [1, 2]
        compile.enable = [false, true]
        [[cells]]
        name = "long"
        training.steps = 50
        """)
    )
    assert [cell.name for cell in cells] == [
        "tensor_parallel_degree=1,compile.enable=false",  # "enable" alone would not say of what
        "tensor_parallel_degree=1,compile.enable=true",
        "tensor_parallel_degree=2,compile.enable=false",
        "tensor_parallel_degree=2,compile.enable=true",
        "long",
    ]
    jobs = [cell.job for cell in cells]
    assert [(job.parallelism.tensor_parallel_degree, job.compile.enable) for job in jobs[:4]] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert [job.training.steps for job in jobs] == [5, 5, 5, 5, 50]
    assert all(job.training.seq_len == 64 for job in jobs), "the base job is below"
    assert all(job.metrics.enable_jsonl for job in jobs)
    assert jobs[4].job.dump_folder == "outputs/sweep/long"


def test_keys_of_an_axis_vary_together_and_its_points_have_names(write):
    cells = cells_of(
        write("""
        [[axis]]
        names = ["small", "large"]
        training.local_batch_size = [2, 4]
        "optimizer.lr" = [1e-3, 2e-3]
        [grid]
        debug.seed = [1, 2]
        """)
    )
    assert [cell.name for cell in cells] == ["seed=1,small", "seed=1,large", "seed=2,small", "seed=2,large"]
    assert [(c.job.training.local_batch_size, c.job.optimizer.lr) for c in cells[:2]] == [
        (2, 1e-3),
        (4, 2e-3),
    ]


def test_groups_of_parameters_vary_as_one_list(write):
    cells = cells_of(
        write("""
        [[axis]]
        names = ["alike", "slow-norms"]
        optimizer.groups = [[], [{pattern = "norm", lr = 1e-4}]]
        """)
    )
    first, second = (cell.job.optimizer.groups for cell in cells)
    assert first == ()
    assert [(group.pattern, group.lr) for group in second] == [("norm", 1e-4)]


def test_values_of_every_kind_reach_the_job(write):
    cell, _ = cells_of(
        write(r"""
        [[cells]]
        name = "odd"
        compile.enable = true
        compile.components = ["loss"]
        compile.mode = "none"
        compile.options = {"max_autotune" = true}
        parallelism.tensor_parallel_degree = 2
        model.plan = {"model.layers.*.attn" = "attn_input"}
        activation_checkpoint.selective_ac_option = "op"
        activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns = ["a, b", 'c"d']
        job.description = "none, = --x \\ \"y\""
        optimizer.lr = 1
        training.batch_size = 3
        [[cells]]
        name = "plain"
        """)
    )
    job = cell.job
    assert (job.compile.components, job.compile.mode, job.compile.options) == (
        ("loss",),
        None,
        {"max_autotune": True},
    )
    assert job.model.plan == {"model.layers.*.attn": "attn_input"}
    assert job.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns == ("a, b", 'c"d')
    assert job.job.description == 'none, = --x \\ "y"'
    assert job.optimizer.lr == 1.0
    assert job.training.local_batch_size == 3, "flame's name"


def test_a_cell_that_contradicts_itself_is_a_refused_cell(write):
    bad, good = cells_of(
        write("""
        [[cells]]
        name = "bad"
        lr_scheduler.total_steps = 5
        [[cells]]
        name = "good"
        """)
    )
    assert bad.job is None
    assert bad.refusal.startswith("lr_scheduler.total_steps = 5: it ends before")
    assert good.refusal is None


def test_what_the_model_refuses_is_asked_without_running(write):
    degrees = "[grid]\nparallelism.tensor_parallel_degree = [2, 3]\n[set]\ntraining.seq_len = 48\n"
    good, bad = cells_of(write(degrees))
    assert refusal(good) is None
    assert refusal(bad).startswith("tensor_parallel_degree = 3 does not divide num_heads")


# ---------------------------------------------------------------- what is refused

ONE = "[grid]\ntraining.steps = [1, 2]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no cell: give [grid] or [[axis]]"),
        ("[grid]\ntraining.steps = 3", "[grid] training.steps = 3: expected a list"),
        ("[grid]\ntraining.stepz = [3]", "[grid] training.stepz: no such key; did you mean training.steps?"),
        ("[grid]\ntrainig.steps = [3]", "[grid]: no section [trainig]; did you mean training?"),
        ("[grid]\ntraining.steps = [3, 0]", "[grid] training.steps 0: expected"),
        ("[grid]\ntraining.steps = [3, 3]", 'two cells are named "training.steps=3"'),
        (
            "[grid]\ntraining.steps = [3]\n[[cells]]\nname = 'x'\ntraining.steps = 3",
            "cells training.steps=3 and x have equal settings",
        ),
        (
            "[[cells]]\nname = 'x'\ntraining.steps = 10\n[[cells]]\nname = 'y'",
            "cells x and y have equal settings",  # 10 is the base job's
        ),
        ("[[cells]]\nname = 'x'\n[[cells]]\nname = 'x'", 'two cells are named "x"'),
        ("[[cells]]\ntraining.steps = 3", "[[cells]] 1, name is missing"),
        ("[[cells]]\nname = '../x'", 'cell "../x": a name is its folder\'s'),
        ("[cells]\nname = 'x'", "expected a list of tables"),
        (ONE + "[set]\ntraining.steps = 3", "training.steps varies, and [set]"),
        (ONE + "[[axis]]\ntraining.steps = [3]", "training.steps varies, and [set]"),
        (ONE + "[set]\ntraining.batch_size = 1\ntraining.local_batch_size = 1", "training.batch_size is the same key"),
        (ONE + "[set]\njob.dump_folder = 'x'", "[set] job.dump_folder: each cell"),
        (ONE + "[set]\nmetrics.enable_jsonl = false", "so the sweep switches them on"),
        (ONE + "[set]\ndebug.seed = 'none'", "debug.seed is unset in cell training.steps=1"),
        (ONE + "[set]\ntraining.dataset_name = 'x'", "[set] training.dataset_name: has a meaning only"),
        (ONE + "[set]\ntraining.data_probs = '1,2'", '[set] training.data_probs = "1,2" is not supported'),
        (ONE + "[training]\nsteps = 3", "no such option; there are sweep, set, grid"),
        (ONE + "[axes]\nx = 3", "no such option; did you mean axis?"),
        ("[[axis]]\ntraining.steps = [1, 2]\noptimizer.lr = [1e-3]", "training.steps has 2, optimizer.lr has 1"),
        (ONE + "[set]\ntraining.steps = 1\n'training.steps' = 2", "[set] training.steps: is given twice"),
        ("[[axis]]\nnames = ['a']\ntraining.steps = [1, 2]", "names has 1, training.steps has 2"),
        ("[[axis]]\nnames = ['a']", "no cell: give [grid]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_sweep_file(write, text, message):
    assert message in refused(write(text))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("", "sweep.base is missing"),
        ('[sweep]\nbas = "base.toml"\n', 'sweep.bas = "base.toml": no such option; did you mean base?'),
        ('[sweep]\nbase = "base.toml"\ntiming_skip_steps = -1\n', "expected an integer, at least 0"),
        ("sweep = 3\n", "sweep = 3: expected a table"),
    ],
)
def test_what_is_wrong_with_the_head(write, head, message):
    assert message in refused(write(ONE, head))


def test_a_base_job_that_is_not_there_or_is_wrong(write, tmp_path):
    with pytest.raises(ConfigError, match=r"^bse.toml: no such job file; did you mean base.toml\?$"):
        cells_of(write(ONE, '[sweep]\nbase = "bse.toml"\n'))
    (tmp_path / "base.toml").write_text("[training]\nstepz = 3\n")
    with pytest.raises(ConfigError, match=r"^base.toml, line 2: training.stepz: no such key"):
        cells_of(write(ONE))
    with pytest.raises(ConfigError, match=r"^missing.toml: .*sweep file; .* base.toml, sweep.toml$"):
        read_spec("missing.toml")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("", "expected a path, found an empty string"),
        ("$NOT_SET", "$NOT_SET is not an environment variable"),
        ("/proc/x", "can't be made and locked (No such file or directory)"),
    ],
)
def test_a_folder_that_can_not_be_made(write, tmp_path, capsys, path, why):
    head = f'[sweep]\nbase = "base.toml"\ndump_folder = "{path}"\n'
    assert main(["sweep", write("[grid.optimizer]\nlr = [1e-3, 2e-3]\n", head)]) == 2
    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


def test_the_base_job_is_a_path_like_others(write, tmp_path, monkeypatch):
    monkeypatch.setenv("JOBS", str(tmp_path))
    cells = cells_of(write("[grid.optimizer]\nlr = [1e-3, 2e-3]\n", '[sweep]\nbase = "$JOBS/base.toml"\n'))
    assert cells[0].arguments[0] == f"{tmp_path}/base.toml"
