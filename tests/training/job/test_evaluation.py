"""`titanplans evaluate` prints the validation losses of a job's checkpoints of any kind, and writes nothing."""

import re

import pytest

from tests.support.jobs import Job, start

SECTION = """
[validation]
enable = true
freq = 4
steps = 2
[[data.sources]]
name = "text"
dataset_path = "text"
[[data.sources]]
name = "other"
dataset_path = "other"
"""
STEPS = "--training.steps=6"


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path)
    path = tmp_path / "job.toml"
    path.write_text(path.read_text().replace('dataset_path = "text.txt"\n', "") + SECTION)
    for name, words in (("text", "quick foxes"), ("other", "all work and no play")):
        (tmp_path / name).mkdir()
        for index in range(40):
            text = " ".join(f"{index * i % 97} {words}" for i in range(100))
            (tmp_path / name / f"{index}.txt").write_text(text)
    return job


def evaluated(job, *options):
    """Return the losses that the command prints, by source, and its full output."""
    assert job.end(start(["evaluate", "job.toml", *options], job.folder)) == 0, job.err
    table = job.out.partition("source ")[2].splitlines()[1:]
    return {name: loss for name, loss, _ in map(str.split, table)}


def files(job):
    return {path: path.stat().st_mtime_ns for path in (job.folder / "out").rglob("*") if path.is_file()}


def test_every_checkpoint_is_validated_source_by_source(job):
    assert job.run(STEPS) == 0, job.err
    steps = [int(step) for step in re.findall(r"step +(\d+)  validation loss", job.out)]
    assert steps == [1, 4, 6], "the last step too"
    before = files(job)
    newest = evaluated(job, STEPS)
    assert "step-6\nsource" in job.out, "it holds only the weights"
    assert set(newest) == {"text", "other"}
    at_five = evaluated(job, STEPS, "--checkpoint.load_step=5")
    assert at_five != newest
    assert files(job) == before
    assert evaluated(job, STEPS, "--parallelism.tensor_parallel_degree=1") == pytest.approx(newest)


def test_a_hugging_face_folder_and_one_source_alone(job):
    """The printed loss of the only source equals the loss that training logs."""
    path = job.folder / "job.toml"
    path.write_text(path.read_text().partition('[[data.sources]]\nname = "other"')[0])
    assert job.run(STEPS, "--checkpoint.last_save_in_hf") == 0, job.err
    logged = re.findall(r"validation loss +([\d.]+)", job.out)[-1]
    assert evaluated(job, STEPS, "--checkpoint.last_save_in_hf") == {"text": logged}
    step = job.folder / "out" / "checkpoint" / "step-6"
    elsewhere = (
        "--job.dump_folder=none",
        f"--checkpoint.initial_load_path={step}",
        "--checkpoint.initial_load_in_hf",
    )
    assert evaluated(job, *elsewhere) == {"text": logged}


def test_missing_checkpoints_and_sources_are_refused(job):
    def refused(*options):
        assert job.end(start(["evaluate", "job.toml", *options], job.folder)) == 2
        return job.err

    assert "evaluate: out/checkpoint holds no checkpoint; name the job's job.dump_folder" in refused()
    assert job.run("--training.steps=5") == 0, job.err
    assert "checkpoint.load_step = 7: there is no out/checkpoint/step-7" in refused(
        "--checkpoint.load_step=7"
    )
    (job.folder / "gla.json").write_text(
        (job.folder / "gla.json").read_text().replace('"num_heads": 4', '"num_heads": 2')
    )
    assert "step-5 is of another model (num_heads = 4, now 2)" in refused()
