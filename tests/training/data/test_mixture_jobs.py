"""A job on a mixture with separated documents: its losses in one process, on four ranks, and resumed at other degrees."""

import os
from pathlib import Path

import pytest

from tests.support import process_groups
from tests.support.data_sources import write_rows
from tests.support.trained_jobs import train, write_inputs

STEPS = ("--training.steps=6", "--lr_scheduler.total_steps=6", "--training.local_batch_size=8")
HALF = ("--training.steps=6", "--lr_scheduler.total_steps=6", "--training.local_batch_size=4")
TP, CP = "--parallelism.tensor_parallel_degree=2", "--parallelism.context_parallel_degree=2"
FSDP = "--parallelism.data_parallel_shard_degree=2"
SAVES = ("--checkpoint.enable", "--checkpoint.interval=3", "--checkpoint.no-last_save_model_only")
METRICS = ("loss_metrics/global_avg_loss", "grad_norm", "data/padding(%)", "data/tokens/a", "data/tokens/b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    write_inputs(folder)
    for name, words, most in (("a", "one two three four", 9), ("b", "five six seven", 30)):
        rows = [{"text": " ".join((words.split() * 9)[: 2 + (7 * i) % most])} for i in range(200)]
        write_rows(folder / f"{name}.jsonl", rows)
    os.environ["TEST_FOLDER"] = str(folder)
    return folder


def mixture(folder: Path) -> tuple[str, ...]:
    """Return the arguments that replace the job's data by a mixture."""
    source = '{{name = "{0}", dataset_path = "{1}/{0}.jsonl", weight = {2}}}'
    sources = ", ".join(source.format(name, folder, weight) for name, weight in (("a", 2.0), ("b", 1.0)))
    options = ("--data.documents=apart", "--data.packing=best_fit", f"--data.sources=[{sources}]")
    return (*options, "--training.dataset=stdlib", "--training.dataset_path=none")


def metrics(dump: str, *options: str) -> dict[str, dict[int, float]]:
    folder = Path(os.environ["TEST_FOLDER"])
    recorder, _ = train(folder, "gla", dump, *mixture(folder), *options)
    return {name: recorder.losses(name) for name in METRICS}


def on_one_rank(rank: int) -> dict:
    return metrics("alone", *STEPS)


def on_four_ranks(rank: int) -> dict:
    return {
        "tp 2 x cp 2": metrics("shared", *STEPS, TP, CP),
        "stopped": metrics("moved", *STEPS[1:], "--training.steps=3", *SAVES, TP, CP),
        "resumed": metrics("moved", *HALF, *SAVES, CP),
    }


def test_a_mixture_trains_the_same_at_any_degrees_and_resumes(folder):
    alone, four = process_groups.run(on_one_rank, 1), process_groups.run(on_four_ranks, 4)
    loss = "loss_metrics/global_avg_loss"
    assert list(alone[loss]) == [1, 2, 3, 4, 5, 6]
    assert alone["data/tokens/a"][6] > alone["data/tokens/b"][6] > 0
    assert 0 < alone["data/padding(%)"][6] < 50
    for name, expected in alone.items():
        # float32, summed in another order.
        assert four["tp 2 x cp 2"][name] == pytest.approx(expected, rel=1e-5), name
        assert four["stopped"][name] | four["resumed"][name] == pytest.approx(expected, rel=1e-5), name


def on_two_ranks(rank: int) -> list[list[int]]:
    options = (
        HALF[2],
        "--training.steps=90",
        "--data.exhausted=end",
        "--training.seq_len=64",
        *SAVES,
        FSDP,
    )
    return [list(metrics("ended", *options)["grad_norm"]) for _ in range(2)]


def test_a_job_ends_on_all_ranks_when_a_source_is_exhausted_and_is_saved(folder):
    first, again = process_groups.run(on_two_ranks, 2)
    assert 3 < len(first) < 80
    assert again == [], "no data is left to train on"
    assert (folder / "ended" / "checkpoint" / f"step-{first[-1]}").is_dir()


def test_data_that_can_not_be_resumed_are_refused_before_the_model_is_loaded(folder):
    """Another packing is refused; another sequence length is not."""
    from titanplans.config import load_job
    from titanplans.errors import DataError
    from titanplans.training.job.checks import check_job

    def job(*options):
        paths = (f"--model.config={folder}/gla.json", f"--job.dump_folder={folder}/early")
        return load_job([f"{folder}/job.toml", *mixture(folder), *SAVES, *paths, *options])

    process_groups.run(on_one_rank_saving, 1)
    check_job(job(), 1)
    with pytest.raises(
        DataError, match=r"^packing of a = 'cut': the checkpoint's data loader had 'best_fit'"
    ):
        check_job(job("--data.packing=cut"), 1)
    check_job(job("--training.seq_len=64"), 1)


def on_one_rank_saving(rank: int) -> None:
    metrics("early", *STEPS[1:], "--training.steps=3", *SAVES)
