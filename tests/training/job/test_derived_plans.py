"""Jobs with `model.derive`: a plan is derived, proved and kept once, used by all ranks, and derived anew after a change."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig

from tests.support import process_groups
from tests.support.jobs import PATIENCE, Job, run_titanplans
from tests.support.paths import ROOT
from tests.support.programs import run_python
from tests.support.refusals import refusal, refusal_or_none
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import apply_plan
from titanplans.config import ConfigError
from titanplans.config.schema import build_job
from titanplans.errors import ParallelError
from titanplans.lock import locked_file
from titanplans.parallel.record import record_of
from titanplans.plan.kept import facts_of, keep_plan
from titanplans.training.checkpoint.manifest import read_manifest
from titanplans.training.job.derived import check_same_plan, keep_derived_plan

TEXT = "from tests.support.tiny_model import TinyPlan\n\n\nclass KeptPlan(TinyPlan):\n    pass\n"


class KeptPlan(TinyPlan):
    pass


pytestmark = pytest.mark.thorough

MODEL = """
import torch
from transformers import ArceeConfig, ArceeForCausalLM, AutoConfig, AutoModelForCausalLM


class OwnConfig(ArceeConfig):
    model_type = "own_architecture"


class OwnForCausalLM(ArceeForCausalLM):
    config_class = OwnConfig


AutoConfig.register("own_architecture", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""

RANDOM = """
def forward(self, *args, **kwargs):
    output = ArceeForCausalLM.forward(self, *args, **kwargs)
    output.logits = output.logits * torch.rand(())
    return output


OwnForCausalLM.forward = forward
"""

MIXES_BETWEEN_BLOCKS = """
def forward(self, input_ids, **kwargs):
    hidden = self.embed_tokens(input_ids)
    positions = torch.arange(input_ids.shape[1])[None]
    for layer in self.layers:
        embeddings = self.rotary_emb(hidden, position_ids=positions)
        hidden = layer(hidden, position_embeddings=embeddings, position_ids=positions)
        hidden = hidden - hidden.mean(1, keepdim=True)
    return type(self).output(last_hidden_state=self.norm(hidden))


def make():
    from transformers import ArceeModel
    from transformers.modeling_outputs import BaseModelOutputWithPast

    return type("OwnModel", (ArceeModel,), {"forward": forward, "output": BaseModelOutputWithPast, "__module__": __name__})


OwnModel = make()
init = OwnForCausalLM.__init__


def __init__(self, config):
    init(self, config)
    self.model = OwnModel(config)
    self.post_init()


OwnForCausalLM.__init__ = __init__
"""

CONFIG = {
    "model_type": "own_architecture",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4096,
    "intermediate_size": 48,
}
OPTIONS = ("--experimental.custom_import=own_architecture", "--training.steps=3")
DERIVES = "one is derived and proved on the CPU"
KEPT = re.compile(
    r"Plan: derived OwnArchitecturePlan, proved in \d+ cases at tp 2.*, kept in (\S+\.py)$", re.M
)


def in_the_folder(arguments):
    os.environ["XDG_CACHE_HOME"] = os.path.join(os.getcwd(), "cache")
    sys.path.insert(0, os.getcwd())
    run_titanplans(arguments)


class OwnJob(Job):
    def __init__(self, folder: Path, model: str = MODEL):
        super().__init__(folder)
        (folder / "gla.json").write_text(json.dumps(CONFIG))
        (folder / "own_architecture.py").write_text(model)

    def train(self, *options: str, dump: str = "out") -> int:
        return self.run(*OPTIONS, f"--job.dump_folder={dump}", *options, entry=in_the_folder)

    @property
    def kept(self) -> set[str]:
        return {file.name for file in (self.folder / "cache" / "titanplans" / "plans").glob("*.py")}


@pytest.fixture
def job(tmp_path):
    return OwnJob(tmp_path)


def test_a_derived_plan_trains_is_kept_and_is_derived_anew_after_a_change(job):
    assert job.train("--model.derive") == 0, job.out + job.err
    assert DERIVES in job.out
    (file,) = {Path(name) for name in KEPT.findall(job.out)}
    assert {file.name} == job.kept
    losses = dict(job.losses)
    manifest = read_manifest(job.folder / "out" / "checkpoint" / "step-3")
    assert manifest.plan is not None
    assert manifest.plan.endswith(f"kept in {file}")
    report = json.loads((job.folder / "out" / "parallelism.json").read_text())
    assert report["tensor_parallel"]["origin"] == manifest.plan

    # Another start uses the file, and proves nothing.
    written = file.stat().st_mtime_ns
    assert job.train("--model.derive", dump="second") == 0, job.out + job.err
    assert DERIVES not in job.out
    assert KEPT.findall(job.out) == [str(file)]
    assert dict(job.losses) == losses
    assert (file.stat().st_mtime_ns, job.kept) == (written, {file.name})

    # The losses are those of the unsplit model.
    assert job.train("--parallelism.tensor_parallel_degree=1", dump="unsplit") == 0, job.out + job.err
    assert {step: float(loss) for step, loss in losses.items()} == pytest.approx(
        {step: float(loss) for step, loss in job.losses}, rel=2e-5
    )

    # A change of the model's source.
    (job.folder / "own_architecture.py").write_text(f"{MODEL}\n# changed\n")
    assert job.train("--model.derive", dump="changed") == 0, job.out + job.err
    assert DERIVES in job.out
    assert len(job.kept) == 2
    assert file.stat().st_mtime_ns == written

    # verify uses it, too.
    process = run_python(
        *("-m", "titanplans", "verify", "job.toml", "--quick", "--json"),
        cwd=with_options(job),
        env={"XDG_CACHE_HOME": str(job.folder / "cache"), "PYTHONPATH": f"{ROOT}:{job.folder}"},
    )
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert "derived OwnArchitecturePlan, proved in" in json.dumps(result)
    assert DERIVES not in process.stderr


def with_options(job: Job) -> Path:
    """Write the options that `train` sets into the job's file, and return the folder."""
    file = job.folder / "job.toml"
    text = file.read_text().replace("[model]\n", "[model]\nderive = true\n")
    file.write_text(f'{text}\n[experimental]\ncustom_import = "own_architecture"\n')
    return job.folder


def test_without_permission_nothing_is_derived(job):
    assert job.train() == 2
    assert job.err.count("\n") == 1
    assert "no plan is registered for OwnForCausalLM" in job.err
    assert "[model] derive = true" in job.err
    assert job.kept == set()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            RANDOM,
            "no plan of OwnForCausalLM is derived: derive OwnForCausalLM: two runs differ, so it draws random",
        ),
        (MIXES_BETWEEN_BLOCKS, "the derived plan of OwnForCausalLM is NOT PROVED: "),
    ],
    ids=["refused", "not proved"],
)
def test_a_plan_that_is_not_proved_ends_the_job_in_one_line(tmp_path, more, message):
    job = OwnJob(tmp_path, MODEL + more)
    assert job.train("--model.derive") == 2, job.out + job.err
    assert job.err.count("\n") == 1
    assert job.err.startswith(f"error: model.derive = true: {message}")
    assert "write a plan (docs/plans.md) and name it in model.plan" in job.err
    assert job.kept == set()


def plans_differ(rank):
    """Split a model on each rank by a plan that only this rank has kept; return the error of rank 0."""
    folder = os.path.join(os.environ["TEST_FOLDER"], str(rank if os.environ["DIFFER"] == "1" else 0))
    os.environ["XDG_CACHE_HOME"] = folder
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Tiny()
    with locked_file(Path(folder, "lock")):
        keep_plan(facts_of(model), KeptPlan, f"{TEXT}# of {folder}\n", "1 case at tp 2")
    dist.barrier()
    record_of(model).plan = apply_plan(model, mesh, derive=True)
    return refusal_or_none(check_same_plan, model, kind=ParallelError)


@pytest.mark.parametrize("differ", [False, True])
def test_ranks_with_different_plans_are_refused(tmp_path, monkeypatch, differ):
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("DIFFER", str(int(differ)))
    error = process_groups.run(plans_differ, 2)
    assert (error is not None) == differ
    if differ:
        assert error.startswith("model.derive = true: the kept plans of rank 1 and rank 0 differ")


def test_nothing_is_derived_for_a_class_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "tests.support.tiny_model:Tiny"
    job = build_job({"model.class": name, "model.derive": True, "parallelism.tensor_parallel_degree": 2})
    config = PretrainedConfig(vocab_size=32, own_class=name, own_arguments={})
    model = Tiny()
    model.config, model.model_type = config, "tiny"
    message = refusal(keep_derived_plan, job, model, kind=ConfigError)
    assert "run titanplans derive my_models:small --output my_plan.py" in message


def test_the_ranks_of_torchrun_and_another_job_derive_one_plan_together(job):
    """Three processes need the plan at the same time: two ranks, and the launcher of a second job."""
    with_options(job)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {
        "XDG_CACHE_HOME": str(job.folder / "cache"),
        "PYTHONPATH": f"{ROOT}:{job.folder}",
        "OMP_NUM_THREADS": "1",
    }
    train = [str(ROOT / "train.py"), "job.toml", "--training.steps=2"]
    commands = [
        [*("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), *train],
        [*train, "--job.dump_folder=other"],
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            cwd=job.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    outputs = [process.communicate(timeout=2 * PATIENCE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert len(job.kept) == 1
    assert all(KEPT.search(output) for output in outputs)
    # The process that derives says how long it took, if it is one whose log is shown.
    assert len(re.findall(r"kept in \S+\.py; \d+ s$", "\n".join(outputs), re.M)) <= 1
    plans = job.folder / "cache" / "titanplans" / "plans"
    assert {file.suffix for file in plans.iterdir()} == {".py", ".lock"}, "no temporary file is left"
