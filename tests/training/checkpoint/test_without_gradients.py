"""A job in which some parameters get no gradient, such as a vision tower without images, resumes from its checkpoints."""

import shutil

import pytest

from tests.support.jobs import Job
from titanplans import modeling

OPTIONS = ("--checkpoint.interval=2", "--checkpoint.no-last_save_model_only")


@pytest.fixture
def job(tmp_path):
    job_in_folder = Job(tmp_path)
    modeling.load_config("gemma3", "debug").to_json_file(tmp_path / "gla.json", use_diff=False)
    return job_in_folder


def test_it_resumes_as_if_undisturbed_and_another_job_starts_from_it(job):
    assert job.run(*OPTIONS, "--training.steps=4") == 0, job.err
    undisturbed = job.losses
    shutil.rmtree(job.folder / "out" / "checkpoint" / "step-4")
    assert job.run(*OPTIONS, "--training.steps=4") == 0, job.err
    assert job.losses == undisturbed[2:]
    assert "39 parameters had no gradient yet and no optimizer state (model.vision_tower" in job.out
    assert job.run(*OPTIONS, "--training.steps=4") == 0, job.err
    assert "is finished" in job.out
    start = f"--checkpoint.initial_load_path={job.folder / 'out' / 'checkpoint' / 'step-4'}"
    assert job.run(start, "--job.dump_folder=other", "--training.steps=1") == 0, job.err
    assert len(job.losses) == 1
