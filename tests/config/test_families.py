"""TOML files of model families, in titanplans and in other packages: their contents, their discovery, and errors."""

import tomllib

import pytest

from tests.support.paths import ROOT
from tests.support.refusals import refusal
from tests.support.system import install_entry_point
from titanplans.config import families as families_module
from titanplans.config.families import find_families, read_family
from titanplans.modeling import ModelError, available
from titanplans.modeling.configs import load_config


def test_every_file_of_the_folder_is_a_family_and_every_table_a_flavor():
    files = {file.stem: tomllib.loads(file.read_text()) for file in (ROOT / "models").glob("*.toml")}
    tables = {
        name: tuple(key for key, value in values.items() if isinstance(value, dict) and key != "defaults")
        for name, values in files.items()
    }
    assert available() == dict(sorted(tables.items()))


def test_none_and_defaults_of_nested_tables(tmp_path):
    file = tmp_path / "x.toml"
    file.write_text(
        'config_class = "a.B"\n[defaults]\nwindow = 4\nrope = { kind = "linear", factor = 8.0 }\n'
        '[small]\nrope.factor = 2.0\n[full]\nwindow = "none"\nrope = "none"\n'
    )
    assert read_family(file).flavors == {
        "small": {"window": 4, "rope": {"kind": "linear", "factor": 2.0}},
        "full": {"window": None, "rope": None},
    }


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("config_class = x", ["is not TOML", "line 1"]),
        ("[debug]\n", ["config_class = None", "transformers.LlamaConfig"]),
        ('config_class = "LlamaConfig"\n', ["config_class = 'LlamaConfig'", "module and name"]),
        ('config_class = "a.B"\nhidden_size = 4\n[debug]\n', ["'hidden_size'", "[defaults]"]),
        ('config_class = "transformers.Llama"\n[debug]\n', ["config_class = 'transformers.Llama'"]),
        ('config_class = "tranformers.LlamaConfig"\n[debug]\n', ["No module named 'tranformers'"]),
        (
            'config_class = "transformers.LlamaConfig"\n[debug]\nhiden_size = 4\n',
            ["debug", "did you mean hidden_size?"],
        ),
        ('config_class = "transformers.LlamaConfig"\n[debug]\nhidden_size = "x"\n', ["debug", "hidden_size"]),
        (
            'config_class = "transformers.Gemma3Config"\n[debug]\ntext_config.layers = 4\n',
            ["Gemma3TextConfig has no field 'layers'"],
        ),
        (
            'class = "tests.support.tiny_model:Tiny"\n[debug]\ntide = true\n',
            ["flavor 'debug'", "'tide'; did you mean tied?", "tiny_model.py"],
        ),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_it(tmp_path, monkeypatch, text, fragments):
    file = tmp_path / "x.toml"
    file.write_text(text)
    monkeypatch.setattr(families_module, "families", lambda: {"x": read_family(file)})
    message = refusal(load_config, "x", "debug", kind=ModelError)
    assert all(word in message for word in [str(file), *fragments])


def package(folder, name, file, entry):
    """Install a package in `folder` with a family's TOML file, and an entry point that names `entry`."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / file).write_text('config_class = "transformers.OlmoConfig"\n[tiny]\nhidden_size = 64\n')
    install_entry_point(folder, "titanplans.models", "sizes", entry)


@pytest.fixture
def uncached():
    """Clear the cache of families before and after a test; otherwise a process reads the files only once."""
    find_families.cache_clear()
    yield
    find_families.cache_clear()


@pytest.mark.usefixtures("uncached")
def test_another_package_adds_families_by_an_entry_point(tmp_path, monkeypatch):
    package(tmp_path, "sizes_of_mine", "my_olmo.toml", "sizes_of_mine")
    monkeypatch.syspath_prepend(tmp_path)
    assert available()["my_olmo"] == ("tiny",)
    assert load_config("my_olmo", "tiny").hidden_size == 64


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(
    ("file", "entry", "fragments"),
    [
        ("llama.toml", "sizes_of_hers", ["'llama' is in two files", "sizes_of_hers"]),
        ("olmo.toml", "sizes_of_his", ["entry point sizes = 'sizes_of_his'", "no module named"]),
    ],
)
def test_an_unusable_entry_point_is_named_and_does_not_affect_others(
    tmp_path, monkeypatch, file, entry, fragments
):
    package(tmp_path, "sizes_of_hers", file, entry)
    monkeypatch.syspath_prepend(tmp_path)
    assert "debug" in available()["llama"]
    message = refusal(load_config, "no_such_model", "debug", kind=ModelError)
    assert all(word in message for word in ["entry point sizes", *fragments])
