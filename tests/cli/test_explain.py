"""`titanplans explain`, as a user calls it."""

import json
from html.parser import HTMLParser

import pytest

from tests.support.programs import run_python

JOB = """
[model]
name = "qwen3"
[training]
local_batch_size = 2
seq_len = 64
[parallelism]
tensor_parallel_degree = 2
data_parallel_shard_degree = 1
[activation_checkpoint]
mode = "{mode}"
"""


@pytest.fixture
def explain(tmp_path):
    for name, mode in {"job": "none", "full": "full"}.items():
        (tmp_path / f"{name}.toml").write_text(JOB.format(mode=mode))

    def run(*options):
        result = run_python("-m", "titanplans", "explain", *options, cwd=tmp_path)
        return result.returncode, result.stdout, result.stderr

    return run


def test_text_page_and_json_of_a_job(explain, tmp_path):
    status, out, err = explain("job.toml")
    assert status == 0, err
    assert "plan: registered Qwen3Plan" in out
    assert "mesh: tp 2" in out
    row = next(line for line in out.splitlines() if line.startswith("self_attn.q_norm"))
    assert row.split()[1:4] == ["ReplicatedInRegion", "weight", "32"]
    assert "its gradient is summed" in row
    assert "2 x 64 x 256/2" in out
    status, out, err = explain("job.toml", "--html", "page.html", "--json")
    assert status == 0, err
    values = json.loads(out)
    assert {"split", "stages", "seconds"} <= set(values)
    assert values["split"][0]["blocks"][0]["kind"] == "Qwen3DecoderLayer"
    page = (tmp_path / "page.html").read_text()
    reader = _Page()
    reader.feed(page)
    assert not reader.open
    assert "self_attn.o_proj" in reader.text
    assert "reduce-scatter tp" in reader.text
    assert not reader.addresses  # the page needs no other file


class _Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text, self.addresses = [], "", []

    def handle_starttag(self, tag, attrs):
        if tag != "meta":
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_difference_of_two_jobs(explain):
    status, out, err = explain("job.toml", "--diff", "full.toml")
    assert status == 0, err
    lines = out.splitlines()
    assert lines[0].split() == ["job.toml", "full.toml"]
    assert any(line.startswith("recomputed ") for line in lines)
    assert any(line.split()[-2:] == ["nothing", "all"] for line in lines if "runs again" in line)
    assert not any("q_proj.weight" in line for line in lines)  # it is split alike


def test_a_job_does_not_differ_from_itself(explain):
    assert explain("job.toml", "--diff", "job.toml")[:2] == (0, "nothing differs\n")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("qwen33",), "did you mean"),
        (("absent.toml",), "absent.toml"),
        (("job.toml", "--diff", "full.toml", "--json"), "--diff prints a table; leave out --html and --json"),
        (("job.toml", "--gpu", "H1000"), "H1000"),
        (("--job.config_file=job.toml", "--diff", "full.toml"), "a job has one file"),
    ],
)
def test_refusals(explain, options, reason):
    status, _, err = explain(*options)
    assert status == 2
    assert reason in err
    assert "Traceback" not in err
