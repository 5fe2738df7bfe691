"""A job names its model as titanplans or torchtitan does; an unknown name is refused before anything else is checked."""

from importlib import resources

import pytest

from tests.support.programs import run_python
from tests.support.system import install_entry_point
from titanplans.config import ConfigError, load_job
from titanplans.config.families import MODELS, find_flavor, read_family
from titanplans.config.other_names import MODELS_OF_OTHERS

# [model] in job files of torchtitan 0.2.2, and the same model in titanplans.
TORCHTITAN = {
    ("llama3", "debugmodel"): ("llama", "debugmodel"),  # also in the file of its integration tests
    ("llama3", "8B"): ("llama", "3.1-8B"),
    ("llama4", "17bx16e"): ("llama4_text", "17bx16e"),
    ("qwen3", "0.6B"): ("qwen3", "0.6B"),
    ("deepseek_v3", "debugmodel"): ("deepseek_v2", "debugmodel"),
}


@pytest.fixture
def job(tmp_path):
    """Return a function that writes a job with a model, a missing tokenizer and missing data, and returns its path."""

    def write(name: str, flavor: str) -> str:
        path = tmp_path / "job.toml"
        path.write_text(
            f'[model]\nname = "{name}"\nflavor = "{flavor}"\nhf_assets_path = "/nowhere"\n'
            '[training]\ndataset = "no/where"\n'
        )
        return str(path)

    return write


@pytest.mark.parametrize("theirs", TORCHTITAN, ids="-".join)
def test_a_model_name_of_torchtitan_is_found(job, theirs):
    loaded = load_job([job(*theirs)])
    ours = TORCHTITAN[theirs]
    assert (loaded.model.name, loaded.model.flavor) == ours
    note = (
        f'model.name = "{theirs[0]}", flavor = "{theirs[1]}" (torchtitan): read as model.name = "{ours[0]}"'
    )
    assert [line.startswith(note) for line in loaded.notes] == [True] * (theirs != ours)


def test_every_foreign_name_leads_to_a_flavor_and_hides_none():
    files = {file.name.removesuffix(".toml"): file for file in resources.files(MODELS).iterdir()}
    for name, flavors in MODELS_OF_OTHERS.items():
        for flavor, ours in flavors.items():
            assert find_flavor(*ours)
            assert name not in files or flavor not in read_family(files[name]).flavors


@pytest.mark.parametrize(
    ("name", "flavor", "message"),
    [
        ("llamma", "debug", "'llamma' is unknown; did you mean llama"),
        ("zzzzz", "debug", "'zzzzz' is unknown; available: abc, .*, bitnet, .* give its config.json"),
        ("qwen3", "7B", "'qwen3' has no flavor '7B'; did you mean 1.7B"),
        ("llama3", "8b", r"'llama3' .*has no flavor '8b' here; did you mean 8B"),
    ],
)
def test_an_unknown_model_is_refused(job, name, flavor, message):
    with pytest.raises(ConfigError, match=message):
        load_job([job(name, flavor)])


def test_the_command_line_overrides_the_flavor(job):
    assert load_job([job("llama3", "none"), "--model.flavor", "8B"]).model.flavor == "3.1-8B"


@pytest.mark.parametrize("option", [[], ["--print-config"]], ids=["run", "print"])
def test_the_model_is_refused_first_and_without_torch(job, tmp_path, option):
    """An unknown name may be a family of another package, so these packages are searched before the name is refused."""
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes" / "__init__.py").touch()
    install_entry_point(tmp_path, "titanplans.models", "sizes", "sizes")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from titanplans.cli.main import main\n"
        "status = main(['train', *sys.argv[2:]])\n"
        "assert 'sizes' in sys.modules and 'torch' not in sys.modules\n"
        "sys.exit(status)"
    )
    result = run_python("-c", script, tmp_path, job("qwen33", "debug"), *option)
    assert (result.returncode, result.stdout) == (2, ""), result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: model 'qwen33' is unknown")
    assert "did you mean qwen3?" in line
