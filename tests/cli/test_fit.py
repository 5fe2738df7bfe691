"""`titanplans fit`, as a user calls it."""

import json

import pytest
import tomli

from tests.support.programs import run_python
from titanplans.cli.fit import write_settings
from titanplans.errors import ConfigError
from titanplans.foresight.layouts import JobLayout
from titanplans.plan.degrees import Degrees

JOB = """
[model]
name = "gla"

[training]
seq_len = 512
local_batch_size = 3  # by hand

[parallelism]
tensor_parallel_degree = 2
"""


@pytest.fixture
def fit(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)

    def run(*options):
        result = run_python("-m", "titanplans", "fit", *options, "job.toml", cwd=tmp_path)
        return result.returncode, result.stdout, result.stderr

    return run


def test_the_best_layout_is_written_and_estimated_alike(fit, tmp_path):
    options = ("--training.dtype", "float32", "--compile.enable", "--seq-len=256")
    status, out, err = fit(
        "--gpus=2xH100", "--global-batch-size=4", "--count=2", "--write", "--json", *options
    )
    assert status == 0, err
    result = json.loads(out)
    best, second = result["layouts"]
    assert any("compile: the job's graphs are traced" in each for each in result["assumptions"])
    assert best["seconds"] <= second["seconds"]
    job = tomli.loads((tmp_path / "job.toml").read_text())
    for section, keys in best["settings"].items():
        assert job[section].items() >= keys.items()
    assert job["training"]["seq_len"] == 256
    compiled = "--compile.enable"  # no part of a layout, so it is not written
    result = run_python("-m", "titanplans", "estimate", "job.toml", "--json", compiled, cwd=tmp_path)
    estimate = json.loads(result.stdout)
    assert estimate["gpus"] == 2
    assert estimate["fits"]
    assert estimate["seconds"] == pytest.approx(best["seconds"], rel=0.02)
    assert estimate["stages"][0]["seconds"]["Triton kernels"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus=2xH100"], "give --global-batch-size"),
        (["--gpus=64", "--global-batch-size=64"], "such as 64xH100"),
        (["--gpus=0xH100", "--global-batch-size=64"], "--gpus 0: expected an integer, at least 1"),
        (["--gpus=2xH1000", "--global-batch-size=64"], "no such GPU; did you mean H100?"),
        (
            ["--gpus=3xH100", "--global-batch-size=3", "--parallelism.data_parallel_replicate_degree=2"],
            "data_parallel_replicate_degree = 2 does not divide it",
        ),
    ],
)
def test_what_is_refused(fit, options, message):
    status, _, err = fit(*options)
    assert (status, message in err) == (2, True), err


def test_other_lines_of_the_job_stay(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    write_settings(file, JobLayout(Degrees(dp_shard=4, tp=1), "selective", 2, 8).settings())
    text = file.read_text()
    assert "local_batch_size = 2  # by hand\n" in text
    assert 'name = "gla"' in text
    job = tomli.loads(text)
    assert job["training"] == {"seq_len": 512, "local_batch_size": 2, "global_batch_size": 8}
    assert job["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert job["parallelism"]["data_parallel_shard_degree"] == 4


def test_a_job_in_another_form_is_not_written(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("training = { seq_len = 512 }\n")
    with pytest.raises(ConfigError, match="set by hand local_batch_size = 2"):
        write_settings(file, JobLayout(Degrees(dp_shard=4), "none", 2, 8).settings())
    assert file.read_text() == "training = { seq_len = 512 }\n"
