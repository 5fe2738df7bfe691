"""`decide_resume`: each row of the table in its docstring, and damaged checkpoints."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support.refusals import refusal
from titanplans.config.schema import build_job
from titanplans.errors import ConfigError
from titanplans.training.checkpoint import folder
from titanplans.training.checkpoint.manifest import MANIFEST, Manifest, damage, write_manifest
from titanplans.training.checkpoint.resume import FOLDER_OPTION, Resume, decide_resume


def write(path: Path, step: int, holds: str = "training", load_step: int | None = None) -> Path:
    """Write a checkpoint that consists only of a manifest."""
    checkpoint = folder.checkpoint_path(path, step)
    checkpoint.mkdir(parents=True)
    job = {} if load_step is None else {"checkpoint.load_step": load_step}
    write_manifest(checkpoint, Manifest(step, holds, {}, job, {}))  # type: ignore[arg-type]
    return checkpoint


def decide(path: Path, *, restarted: bool = False, **options: object) -> Resume:
    values = {f"checkpoint.{key}": value for key, value in options.items()}
    job = build_job({"checkpoint.enable": True, "training.steps": 10} | values)
    return decide_resume(job, path, restarted=restarted)


def refused(path: Path, **options: object) -> str:
    return refusal(decide, path, **options, kind=ConfigError)


# The rows of the table: options, checkpoints by step ("w": only weights), and the loaded checkpoint.
LOADS = [
    ({"enable": False}, "8", "nothing"),
    ({"create_seed_checkpoint": True}, "", "nothing"),
    ({"load_step": 4, "load_only": True}, "4 10", "step-4 training"),
    ({"initial_load_path": "a/step-3"}, "", "a/step-3 weights"),
    ({"initial_load_path": "a/step-3", "initial_load_model_only": False}, "", "a/step-3 training"),
    ({"initial_load_path": "a/step-3"}, "4", "step-4 training"),
    ({}, "", "nothing"),
    ({}, "8 10", "finished step-10"),
    ({}, "8 12w", "finished step-12"),
    ({"load_step": 10}, "8 10", "finished step-10"),
    ({"load_only": True}, "8 10", "step-10 training"),
    ({"load_step": 8}, "4 8", "step-8 training"),
    ({"load_step": 0}, "0w", "step-0 weights"),
    ({}, "4 8", "step-8 training"),
    ({}, "4 8w", "step-4 training"),
    ({}, "0w 8w", "step-0 weights"),
]
REFUSED = [
    ({"create_seed_checkpoint": True}, "8", "already holds step-8"),
    ({"load_step": 4}, "8", "there is no .*/step-4; -1 takes the newest"),
    ({"load_step": 4}, "", "there is no .*/step-4"),
    ({"load_step": 4}, "4 8", r'later checkpoints, up to step-8, .*initial_load_path = ".*/step-4"'),
    ({"load_step": 4}, "4 10", "later checkpoints, up to step-10"),
    ({"load_step": 8}, "4 8w", "step-8 holds only the weights .* omit load_step"),
    (
        {},
        "4w 8w",
        "step-8 holds only the weights .* and no other checkpoint holds more; start in a new folder",
    ),
]


def create(path: Path, checkpoints: str) -> Path:
    for each in checkpoints.split():
        write(path, int(each.removesuffix("w")), "weights" if each.endswith("w") else "training")
    return path


@pytest.mark.parametrize(("options", "checkpoints", "does"), LOADS)
def test_what_a_job_loads(tmp_path, options, checkpoints, does):
    create(tmp_path, checkpoints)
    before = sorted(tmp_path.iterdir())
    resume = decide(tmp_path, **options)
    is_own = resume.source is not None and resume.source.parent == tmp_path
    assert is_own == (resume.key == FOLDER_OPTION)
    if does == "nothing":
        assert resume == Resume()
    else:
        source = resume.source.name if is_own and resume.source else str(resume.source)
        assert does == (f"finished {source}" if resume.is_finished else f"{source} {resume.contents}")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("options", "checkpoints", "message"), REFUSED)
def test_what_a_job_refuses_to_load(tmp_path, options, checkpoints, message):
    assert re.search(message, refused(create(tmp_path, checkpoints), **options))


def test_a_job_loads_the_weights_of_a_hugging_face_folder(tmp_path):
    folder = tmp_path / "own"
    named = {"initial_load_in_hf": True, "initial_load_path": "published"}
    assert decide(folder, **named) == Resume(
        Path("published"), "weights", "checkpoint.initial_load_path", in_hf=True
    )
    assets = {
        "checkpoint.enable": True,
        "checkpoint.initial_load_in_hf": True,
        "model.hf_assets_path": "assets",
    }
    resume = decide_resume(build_job(assets), folder, restarted=False)
    assert resume == Resume(Path("assets"), "weights", "model.hf_assets_path", in_hf=True)


def test_a_job_restarted_by_a_launcher_resumes_its_own_checkpoint(tmp_path):
    write(tmp_path, 4)
    write(tmp_path, 8)
    # The newest checkpoint is of another job: the launcher has restarted a job that was refused.
    assert "later checkpoints" in refused(tmp_path, load_step=4, restarted=True)
    of_this_job = write(tmp_path, 9, load_step=4)
    assert decide(tmp_path, load_step=4, restarted=True) == Resume(of_this_job, "training", FOLDER_OPTION)
    # the user starts the job again (not a launcher); this would lose the steps after 4, so it is refused
    assert "up to step-9" in refused(tmp_path, load_step=4)
    last = write(tmp_path, 10, "weights", load_step=4)
    assert decide(tmp_path, load_step=4, restarted=True) == Resume(last, key=FOLDER_OPTION, is_finished=True)


def test_a_damaged_manifest_is_refused_and_the_newest_intact_checkpoint_offered(tmp_path):
    for step in (0, 2, 4, 6, 8):
        write(tmp_path, step, "training" if step else "weights")
    for step in (6, 8):
        manifest = tmp_path / f"step-{step}" / MANIFEST
        manifest.write_bytes(manifest.read_bytes()[:-5])
    for options in ({}, {"load_step": 8}):
        message = refused(tmp_path, **options)
        assert re.search(r"step-8/titanplans\.json is damaged .*; remove step-8 and step-6, ", message)
        assert "the same command resumes from step-4, the newest intact checkpoint" in message
    for step in (8, 6):
        shutil.rmtree(tmp_path / f"step-{step}")
    assert decide(tmp_path) == Resume(tmp_path / "step-4", "training", FOLDER_OPTION)
    for step in (0, 2, 4):
        manifest = tmp_path / f"step-{step}" / MANIFEST
        manifest.write_bytes(b"")
    assert "no other checkpoint is intact and has the training state; move the folder away" in refused(
        tmp_path
    )


def test_a_checkpoint_that_was_renamed_is_not_taken_for_another_step(tmp_path):
    """A renamed checkpoint is refused. Otherwise it would stay the newest, and every restart would begin from it."""
    for step in (4, 6):
        write(tmp_path, step)
    renamed = (tmp_path / "step-4").rename(tmp_path / "step-9")
    message = refused(tmp_path)
    assert message.startswith(f"checkpoint.folder: {renamed} holds step 4, so the folder ")
    assert "remove step-9, and the same command resumes from step-6" in message
    # a job may start from a checkpoint with a name that is not a step's
    renamed_again = (tmp_path / "step-9").rename(tmp_path / "best")
    assert damage(renamed_again) is None
