"""[quantize.linear.float8] of a job: how its options are read, and errors before anything starts."""

import pytest

from tests import zoo
from tests.support.refusals import refusal
from titanplans.config import load_job, strategy_of
from titanplans.errors import UserError
from titanplans.parallel import FSDP2Config
from titanplans.training.job.checks import check_job

SECTION = "quantize.linear.float8"


@pytest.fixture
def load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    for index in range(40):
        (tmp_path / "text" / f"{index}.txt").write_text("all work and no play makes jack a dull boy\n" * 40)

    def load(float8="", *arguments, model=""):
        text = (
            f"[model]\n{model}\n[training]\ndataset_path = 'text'\nseq_len = 64\n[activation_checkpoint]\nmode = 'none'\n"
            f"[{SECTION}]\n{float8}\n"
        )
        (tmp_path / "job.toml").write_text(text)
        return load_job(["job.toml", *arguments])

    return load


def test_the_section_becomes_options_of_the_strategy(load):
    assert strategy_of(load()).float8 == FSDP2Config().float8
    job = load(
        "recipe_name = 'tensorwise'\nfilter_fqns = ['lm_head']\nfilter_unaligned = true\nemulate = true\n"
        "enable_fsdp_float8_all_gather = true\nprecompute_float8_dynamic_scale_for_fsdp = true"
    )
    assert strategy_of(job).float8.to_dict() == {
        "recipe_name": "tensorwise",
        "filter_fqns": ["lm_head"],
        "filter_unaligned": True,
        "emulate": True,
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
    }


def test_torchtitans_template_loads_without_float8(load):
    """torchtitan's config files set the filter in this section, but enable float8 in another."""
    assert strategy_of(load("filter_fqns = ['output']", model="converters = []")).float8.recipe_name is None


@pytest.mark.parametrize("name", ["quantize.linear.float8", "float8"])
def test_the_converter_of_torchtitan_enables_float8(load, name):
    job = load(model=f"converters = ['{name}']")
    assert job.quantize.linear.float8.recipe_name == "tensorwise"
    assert (
        'model.converters (torchtitan): read as quantize.linear.float8.recipe_name = "tensorwise"'
        in job.notes[0]
    )
    job = load("recipe_name = 'rowwise'", model=f"converters = ['{name}']")
    assert job.quantize.linear.float8.recipe_name == "rowwise"


MODEL = "name = 'qwen3'\n"
REFUSED = {
    "other converter": ("", "converters = ['mx']", 'model.converters = ["mx"] is not supported: only'),
    "filter": (
        "recipe_name = 'rowwise'\nfilter_fqns = ['output']",
        MODEL,
        f"{SECTION}.filter_fqns = [\"output\"]: 'output' is part of no Linear's name; there are q_proj, k_proj, v_proj",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_name_the_options_of_the_job(load, case):
    float8, model, expected = REFUSED[case]
    message = refusal(lambda: check_job(load(float8, model=model), 1))
    assert expected in message


def test_sizes_that_float8_does_not_support_are_refused(load):
    with pytest.raises(UserError, match=r"float8 needs .*16; 112 or 128"):
        load("recipe_name = 'rowwise'", "--training.seq_len=15", "--training.local_batch_size=8")
    job = load("recipe_name = 'rowwise'", "--parallelism.tensor_parallel_degree=16", model=MODEL)
    with pytest.raises(UserError, match="tensor_parallel_degree = 16"):
        check_job(job, 16)
    zoo.config("llama", intermediate_size=48, vocab_size=4096).save_pretrained(".")
    job = load(
        "recipe_name = 'rowwise'", "--parallelism.tensor_parallel_degree=2", model="config = 'config.json'"
    )
    with pytest.raises(UserError, match=r"mlp.* 48 outputs .*multiples of 16"):
        check_job(job, 2)
