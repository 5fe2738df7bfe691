"""Jobs on two ranks with other strategies than the default have the same losses as with the default."""

import itertools
import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from tests.support import process_groups
from tests.support.operator_counts import OperatorCounts
from tests.support.trained_jobs import DEGREE, losses_of, train, write_inputs
from titanplans.errors import Diverged

pytestmark = pytest.mark.thorough

# With the schedule of the full run, so that the first four steps are the same.
STEPS = ("--training.steps=4", "--lr_scheduler.total_steps=8")
DDP = ("--parallelism.data_parallel_strategy=ddp", "--parallelism.data_parallel_replicate_degree=2")
TWICE = ("--training.local_batch_size=2", "--training.gradient_accumulation_steps=2")
OPTIMIZER = (
    "--compile.enable", "--compile.components=optimizer", "--compile.backend=aot_eager",
    "--optimizer.implementation=foreach",
)  # fmt: skip
MUON = ("--optimizer.name=Muon", "--optimizer.groups=[{pattern = 'embed|lm_head', lr = 1e-3}]")
MUON_SAVES = (*MUON, "--checkpoint.enable", "--checkpoint.interval=4")
VALIDATION = ("--validation.enable", "--validation.freq=4", "--validation.steps=3")
FLOAT8 = (
    DEGREE, "--quantize.linear.float8.recipe_name=tensorwise", "--quantize.linear.float8.emulate",
    "--quantize.linear.float8.filter_fqns=lm_head",
)  # fmt: skip
DEFERRED = ("--parallelism.fsdp_defer_grad_sync=all", "--parallelism.fsdp_keep_gathered")


def counted(folder: Path, dump: str, *options: str):
    """Return the metrics of a run, and its counts of all-gathers and reduce-scatters."""
    with OperatorCounts() as count:
        recorder, _ = train(folder, "gla", dump, *STEPS, *options)
    return recorder, count.of("_allgather_base_"), count.of("_reduce_scatter_base_")


def poisoned(folder: Path, dump: str, *options: str):
    """Make the input of rank 1's head NaN in step 3; return losses, whether states after steps are equal, and the log."""
    import torch

    states, log = [], []
    logger, handler = logging.getLogger("titanplans.training.trainer.step"), logging.Handler()
    handler.emit = lambda record: log.append(record.getMessage())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)

    def prepare(trainer):
        def poison(module, args):
            (hidden,) = args
            at = trainer.step == 3 and torch.distributed.get_rank() == 1
            return hidden * float("nan") if at else None

        trainer.model_parts[0].lm.lm_head.register_forward_pre_hook(poison)
        *_, last = trainer.optimizers

        def note(*args):
            tensors = []
            for optimizer in trainer.optimizers:
                tensors += [p for group in optimizer.param_groups for p in group["params"]]
                tensors += [moment for state in optimizer.state.values() for moment in state.values()]
            states.append([getattr(t, "_local_tensor", t).detach().clone() for t in tensors])

        last.register_step_post_hook(note)

    recorder, _ = train(folder, "gla", dump, *STEPS, *options, prepare=prepare)
    logger.removeHandler(handler)
    same = [all(map(torch.equal, *pair)) for pair in itertools.pairwise(states)]
    return recorder.losses(), same, log


def resumed_losses(folder: Path, dump: str, *options: str) -> dict[int, float]:
    """Resume a run from the newest full checkpoint of `dump`, saving every second step; return its losses."""
    import torch

    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(folder / dump / "checkpoint" / "step-8")
    torch.distributed.barrier()
    return losses_of(folder, "gla", dump, "--checkpoint.enable", "--checkpoint.interval=2", *options)


def on_two_ranks(rank: int) -> dict:
    import torch
    from torch._dynamo.utils import counters

    folder = Path(os.environ["TEST_FOLDER"])
    results: dict = {
        "fsdp2": losses_of(folder, "gla", "fsdp2", "--checkpoint.enable", "--checkpoint.interval=4"),
        "ddp": losses_of(folder, "gla", "ddp", *STEPS, *DDP),
        "ddp accumulated": losses_of(
            folder, "gla", "ddp-acc", *STEPS, *DDP, *TWICE, "--ddp.gradient_as_bucket_view"
        ),
    }
    for name, options in {"at once": (), "deferred": DEFERRED}.items():
        recorder, gathers, scatters = counted(folder, name, *TWICE, *options)
        results[name] = recorder.losses()
        results[name, "counts"] = gathers, scatters
    for name, options in {"sharded": (), "unsharded": ("--validation.unshard",)}.items():
        recorder, gathers, _ = counted(folder, name, *VALIDATION, *options)
        results[name] = recorder.losses() | {"validation": recorder.losses("validation_metrics/loss")}
        results[name, "gathers"] = gathers
    for name, options in {"fsdp2 skips": (), "ddp skips": DDP}.items():
        results[name] = poisoned(folder, name, *options, "--training.skip_nan_inf")
    with pytest.raises(Diverged, match="step 3: the loss is not finite"):
        poisoned(folder, "stops")
    counters.clear()
    results["on with a compiled optimizer"] = resumed_losses(folder, "fsdp2", *OPTIMIZER)  # from step 4
    results["graphs"] = counters["stats"]["unique_graphs"]
    results["and back under ddp"] = resumed_losses(folder, "fsdp2", *DDP)  # from step 6

    results["muon"] = losses_of(folder, "dense", "muon", *MUON_SAVES)
    recorder, trainer = train(
        folder,
        "dense",
        "muon-tp",
        "--training.steps=5",
        STEPS[1],
        *MUON_SAVES,
        DEGREE,
        "--training.local_batch_size=8",
    )
    results["muon, tp"] = recorder.losses()
    rows = [row for row in recorder.rows if "lr/Muon" in row]
    results["muon's rates"] = {name: value for name, value in rows[0].items() if name.startswith("lr/")}
    results["muon's groups"] = [
        (type(optimizer).__name__, group["initial_lr"], group["lr"], group["weight_decay"])
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    results["muon, ddp"] = losses_of(folder, "dense", "muon-ddp", *STEPS, *MUON, *DDP)
    torch.distributed.barrier()
    if rank == 0:
        shutil.copytree(folder / "muon-tp" / "checkpoint" / "step-4", folder / "begun")
    torch.distributed.barrier()
    full_state = (f"--checkpoint.initial_load_path={folder}/begun", "--checkpoint.no-initial_load_model_only")
    results["muon, on with fsdp2 from tp"] = losses_of(folder, "dense", "muon-on", *MUON_SAVES, *full_state)
    changed = (
        "--optimizer.groups=[{pattern = 'embed|lm_head', lr = 5e-4}, {pattern = 'norm', weight_decay = 0.2}]"
    )
    _, trainer = train(folder, "dense", "muon-changed", MUON[0], changed, *MUON_SAVES[2:], *full_state)
    results["changed groups"] = [
        (group["initial_lr"], group["weight_decay"], len(group["params"]))
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    results["muon skips"] = poisoned(folder, "muon-skips", *MUON, "--training.skip_nan_inf")
    gathered = (*FLOAT8[1:], "--quantize.linear.float8.enable_fsdp_float8_all_gather")
    for name, options in {"split": FLOAT8, "gathered": gathered}.items():
        results["float8, muon", name] = losses_of(folder, "dense", f"muon-{name}", *STEPS, *options, *MUON)
    results["float8"] = losses_of(folder, "dense", "float8", *STEPS, *FLOAT8)
    results["float8 report"] = json.loads((folder / "float8" / "parallelism.json").read_text())["float8"]
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    write_inputs(tmp_path_factory.mktemp("jobs"))
    return process_groups.run(on_two_ranks, 2)


def approx_of(losses: dict[int, float], all_losses: dict[int, float]):
    # float32, summed in another order, as in test_trainer.
    return pytest.approx({step: all_losses[step] for step in losses}, rel=1e-5)


@pytest.mark.parametrize("case", ["ddp", "ddp accumulated", "at once", "deferred"])
def test_each_strategy_has_the_losses_of_fsdp2(two_ranks, case):
    assert list(two_ranks[case]) == [1, 2, 3, 4]
    assert two_ranks["fsdp2"][4] < two_ranks["fsdp2"][1] - 0.01, "a model that does not learn proves nothing"
    assert two_ranks[case] == approx_of(two_ranks[case], two_ranks["fsdp2"])


def test_deferred_gradients_are_summed_once_a_step_and_weights_stay_gathered(two_ranks):
    (gathers, scatters), (fewer, half) = two_ranks["at once", "counts"], two_ranks["deferred", "counts"]
    assert half * 2 == scatters > 0
    assert fewer < gathers


def test_a_validation_of_gathered_weights_is_the_same_and_gathers_less(two_ranks):
    assert two_ranks["unsharded"] == two_ranks["sharded"]
    assert list(two_ranks["sharded"]["validation"]) == [1, 4]
    assert two_ranks["unsharded", "gathers"] < two_ranks["sharded", "gathers"]


def test_muon_trains_the_same_under_each_strategy(two_ranks):
    assert two_ranks["muon"][8] < two_ranks["muon"][1] - 0.1
    for case in ("muon, tp", "muon, ddp"):
        # Muon rounds to bfloat16; a value between two neighbours may be rounded to the other one.
        assert two_ranks[case] == pytest.approx(
            {step: two_ranks["muon"][step] for step in two_ranks[case]}, rel=1e-4
        )


def test_each_group_has_its_schedule(two_ranks):
    # The values after the first of two warm-up steps. AdamW has two groups: the embedding, and parameters without decay.
    assert two_ranks["muon's rates"] == pytest.approx(
        {"lr/AdamW/0": 5e-4, "lr/AdamW/1": 15e-4, "lr/Muon": 15e-4}
    )
    last = two_ranks["muon's groups"][0][2] / 1e-3
    assert 0 < last < 1
    assert two_ranks["muon's groups"] == [
        ("AdamW", 1e-3, pytest.approx(1e-3 * last), 0.1),
        ("AdamW", 3e-3, pytest.approx(3e-3 * last), 0.0),
        ("Muon", 3e-3, pytest.approx(3e-3 * last), 0.1),
    ]


def test_the_momentum_of_muon_is_resumed_at_another_degree(two_ranks):
    losses = two_ranks["muon, on with fsdp2 from tp"]
    assert list(losses) == [5, 6, 7, 8]
    assert losses == pytest.approx({step: two_ranks["muon"][step] for step in losses}, rel=1e-4)


def test_changed_groups_take_effect_on_resume(two_ranks):
    assert two_ranks["changed groups"] == [(5e-4, 0.1, 1), (3e-3, 0.2, 5), (3e-3, 0.1, 14)]


@pytest.mark.parametrize("how", ["split", "gathered"])
def test_muon_takes_float8(two_ranks, how):
    losses = two_ranks["float8, muon", how]
    assert losses[4] < losses[1] - 0.01


@pytest.mark.parametrize("case", ["fsdp2 skips", "ddp skips"])
def test_a_step_that_is_not_finite_on_one_rank_changes_nothing(two_ranks, case):
    losses, same, log = two_ranks[case]
    assert log == ["step 3: the gradient's norm is nan, so the step is skipped (1 in this run)"]
    assert same == [False, True, False]  # the weights after steps 1 and 2, 2 and 3, 3 and 4
    assert list(losses) == [1, 2, 4]  # torchtitan logs no line for a loss that is not finite
    assert {1: losses[1], 2: losses[2]} == approx_of({1: ..., 2: ...}, two_ranks["fsdp2"])
    assert losses[4] < losses[2]


def test_muon_skips_steps_too(two_ranks):
    losses, same, _ = two_ranks["muon skips"]
    assert same == [False, True, False]
    assert list(losses) == [1, 2, 4]


@pytest.mark.parametrize(("case", "first"), [("on with a compiled optimizer", 5), ("and back under ddp", 7)])
def test_a_checkpoint_resumes_under_another_strategy_and_optimizer(two_ranks, case, first):
    assert list(two_ranks[case]) == list(range(first, 9))
    assert two_ranks[case] == approx_of(two_ranks[case], two_ranks["fsdp2"])


def test_the_step_of_the_optimizer_is_compiled_once(two_ranks):
    # A learning rate that is a Python number would recompile in each step.
    assert two_ranks["graphs"] == 1


def test_a_job_trains_in_float8_and_says_so(two_ranks):
    assert two_ranks["float8"][4] < two_ranks["float8"][1] - 0.01
    report = two_ranks["float8 report"]
    assert report["recipe"] == "tensorwise"
    assert report["emulated"]
    assert len(report["converted"]) == 14  # seven modules in each of two blocks
    assert report["filtered"] == {"lm_head": "filter_fqns has 'lm_head'"}
    assert report["borders"]["model.layers.0.self_attn"] == {"activations": "in float8"}
    assert report["borders"]["model.layers.0.mlp.down_proj"] == {"gradients": "in float8"}
