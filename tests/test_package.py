"""Wheel and source distribution contain the full project, which works next to folders with the names of its packages."""

import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import tomli
from packaging.requirements import Requirement

from tests.support.paths import ROOT

SOURCES = ("titanplans", "plans", "models", "pyproject.toml", "README.md", "LICENSE")
BUILD = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
MY_PLANS = """
from titanplans import TPPlan, register_plan

@register_plan("my_architecture")
class MyPlan(TPPlan):
    def attn_plan(self, attn):
        return {
            **self.attn_input(),
            "q_proj": self.colwise(), "k_proj": self.colwise(), "v_proj": self.colwise(),
            "o_proj": self.rowwise(),
        }
"""
MY_MODELS = """
from transformers import LlamaConfig, LlamaForCausalLM

def build():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
"""


def packages() -> dict[str, Path]:
    """Return the folder of every package by the package's name."""
    folders = {}
    for top, name in (
        (ROOT / "titanplans", "titanplans"),
        *((ROOT / n, f"titanplans.{n}") for n in ("plans", "models")),
    ):
        for file in top.rglob("__init__.py"):
            folders[".".join([name, *file.parent.relative_to(top).parts])] = file.parent
    return folders


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """Return the wheel and the source distribution. They are built from a copy, as the build writes next to the sources."""
    copy = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        (copy / name).parent.mkdir(exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / name, copy / name], check=True)
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True)
    (wheel,), (sdist,) = (copy / "dist").glob("*.whl"), (copy / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_every_package_is_listed():
    listed = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(packages())


def test_wheel_and_source_hold_every_file(built):
    wheel, sdist = built
    with zipfile.ZipFile(wheel) as file:
        installed = set(file.namelist())
    with tarfile.open(sdist) as file:
        released = {name.partition("/")[2] for name in file.getnames()}
    for package, folder in packages().items():
        files = [*folder.glob("*.py"), *folder.glob("*.toml"), *folder.glob("tokenizer/*.json")]
        for file in files:
            path = file.relative_to(folder).as_posix()
            assert f"{package.replace('.', '/')}/{path}" in installed
            assert file.relative_to(ROOT).as_posix() in released
    assert not [name for name in installed if name.startswith(("plans/", "models/", "tests/"))]


def environment(folder: Path, wheel: Path) -> tuple[Path, Path]:
    """Make a virtual environment with only the wheel; return its Python and the folder of its packages."""
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return folder / "bin" / "python", site


@pytest.fixture(scope="module")
def python(built, tmp_path_factory) -> Path:
    """Return the Python of an environment with the wheel and its dependencies."""
    python, site = environment(tmp_path_factory.mktemp("environment"), built[0])
    # A .pth file adds these folders to sys.path, but not their own .pth files, so that an editable install is left out.
    dependencies = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "dependencies.pth").write_text("\n".join(dependencies))
    return python


@pytest.fixture(scope="module")
def light_python(built, tmp_path_factory) -> Path:
    """Return the Python of an environment with the packages that `pip install titanplans` installs without extras."""
    python, site = environment(tmp_path_factory.mktemp("light"), built[0])
    for distribution in required_distributions(site):
        for file in distribution.files or ():
            top = Path(file).parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return python


def required_distributions(site: Path) -> list[metadata.Distribution]:
    """Return the installed distributions that the titanplans in `site` needs, directly or through others."""
    (titanplans,) = metadata.distributions(name="titanplans", path=[str(site)])
    found: dict[str, metadata.Distribution] = {}
    pending = [(requirement, "") for requirement in titanplans.requires or ()]
    while pending:
        line, extra = pending.pop()
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name not in found:
            found[requirement.name] = distribution = metadata.distribution(requirement.name)
            for wanted in ("", *requirement.extras):
                pending += [(line, wanted) for line in distribution.requires or ()]
    return list(found.values())


def run_light(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-E", "-m", "titanplans", *words]  # without PYTHONPATH
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.thorough
def test_the_light_install_proves_a_plan(light_python, tmp_path):
    done = run_light(light_python, tmp_path, "verify", "qwen3", "--tp", "2", "--quick")
    assert done.returncode == 0, done.stderr
    assert "proved: 2 cases" in done.stdout
    assert "torchtitan's loss is not compared: a job needs torchtitan, which is not installed" in " ".join(
        done.stdout.split()
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "library", "extra"),
    [
        (("verify", "gla"), "flash-linear-attention", "fla"),
        (("verify", "qwen3", "--float8", "rowwise"), "torchao", "float8"),
        (("verify", "qwen3", "--kernels", "real", "--quick"), "triton", "fla"),
        (("train", str(ROOT / "configs" / "gla_debug.toml")), "xxhash", "train"),
        (("evaluate", str(ROOT / "configs" / "gla_debug.toml")), "xxhash", "train"),
        (("data", str(ROOT / "configs" / "gla_debug.toml")), "torchtitan", "train"),
        (("check", "outputs"), "xxhash", "train"),
        (("sweep", str(ROOT / "configs" / "experiments" / "tp_variants.toml")), "xxhash", "train"),
    ],
)
def test_without_its_extra_a_command_names_it_in_one_line(light_python, tmp_path, words, library, extra):
    done = run_light(light_python, tmp_path, *words)
    assert done.returncode == 2
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert f"needs {library}, which is not installed: pip install 'titanplans[{extra}]'" in error
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_plan_is_proved_in_a_folder_with_other_plans_models_and_training(python, tmp_path):
    for name in ("plans", "models", "training", "parallel"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(
            "raise SystemExit('a package of somebody else was imported')"
        )
    (tmp_path / "my_plans.py").write_text(MY_PLANS)
    (tmp_path / "my_models.py").write_text(MY_MODELS)
    arguments = ["verify", "my_plans:MyPlan", "--model", "my_models:build", "--tp", "2", "--loss-parallel"]
    result = subprocess.run(
        [python, "-m", "titanplans", *arguments, "--sequence-parallel", "--quick"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "MyPlan" in result.stdout
    where = subprocess.run(
        [python, "-c", "import titanplans, titanplans.plans; print(titanplans.plans.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(python.parents[1])
