"""Python blocks of the docs run, TOML blocks load as a job, a sweep, a family or a GPU, and links have targets."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import jobs
from tests.support.paths import GENERATED, ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
LINKING = [
    *PAGES,
    *(GENERATED).glob("*.md"),
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "examples/out_of_tree/README.md")),
]
ELSEWHERE = ("fla", "legacy", "outputs", "dump_folder", "rank_N")
"""The first components of paths outside of this repository: of other projects, or of files that a job writes."""
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in BLOCK.findall(page.read_text()) if kind == language]


def pages_with(language: str):
    return pytest.mark.parametrize(
        "page", [p for p in PAGES if blocks(p, language)], ids=lambda p: str(p.relative_to(ROOT))
    )


@pytest.mark.thorough
@pages_with("python")
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "docs"}
    for index, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{page.name}, Python block {index}", "exec"), namespace)


@pytest.mark.thorough
def test_the_page_from_a_hugging_face_folder_and_back_works(tmp_path):
    """The blocks run in order, each in a new process: Python (py), a job, commands (sh).

    The last block runs in a process that has not imported titanplans.
    """
    text = (ROOT / "docs" / "weights.md").read_text()
    section = text[text.index("## From a folder to a folder") : text.index("## Start from a folder")]
    *first_blocks, (last, loads) = BLOCK.findall(section)
    assert ([language for language, _ in first_blocks], last) == (["py", "toml", "sh"], "py")
    (_, builds), (_, job), (_, commands) = first_blocks
    (tmp_path / "tuned.toml").write_text(job)
    for message, by in [([builds], python), *((message, None) for message in titanplans(commands))]:
        jobs.output(message, tmp_path, by)
    command = [sys.executable, "-"]
    result = subprocess.run(command, input=loads, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert float(result.stdout.rsplit(" ", 1)[1]) > 0.01


def titanplans(commands: str) -> list[list[str]]:
    """Return the arguments of each line, which must be a command of titanplans."""
    lines = [shlex.split(line, comments=True) for line in commands.splitlines()]
    assert {line[0] for line in lines} == {"titanplans"}
    return [line[1:] for line in lines]


def python(arguments: list[str]) -> None:
    exec(arguments[0], {"__name__": "__main__"})


@pages_with("toml")
def test_toml_blocks_load(page, tmp_path, monkeypatch):
    from titanplans.cli.sweep import read_sweep
    from titanplans.config import load_job
    from titanplans.config.families import read_family
    from titanplans.foresight.hardware import find_gpu

    monkeypatch.chdir(ROOT)  # sweeps name their base job relative to the root

    for index, block in enumerate(blocks(page, "toml"), 1):
        job = tmp_path / f"{index}.toml"
        job.write_text(block)
        if "[sweep]" in block:
            assert not any(cell.refusal for cell in read_sweep(str(job))[1])
        elif block.startswith("config_class"):
            assert read_family(job).flavors
        elif "like = " in block:
            assert find_gpu("cluster", job)
        else:
            load_job([str(job)])


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_have_targets(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


def prose(page: Path) -> str:
    """Return a page without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of headings: lower case, hyphens for spaces, no punctuation."""
    return {
        re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-")
        for line in re.findall(r"^#+ (.*)", prose(page), re.M)
    }


def test_anchors_are_those_of_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# FLA on a CPU\n## On a GPU: `make gpu`\n### [[optimizer.groups]]\n```\n# no heading\n```\n"
    )
    assert anchors(page) == {"fla-on-a-cpu", "on-a-gpu-make-gpu", "optimizergroups"}


def test_paths_that_the_code_names_exist():
    """Pages, programs and pictures in docs that errors, docstrings and comments name exist."""
    code = [
        f for folder in ("titanplans", "plans", "tests", "benchmarks") for f in (ROOT / folder).rglob("*.py")
    ]
    for file in [*code, *(ROOT / "configs").rglob("*.toml"), ROOT / "Makefile"]:
        for named in re.findall(r"(?<![\w/])docs/[\w/-]+\.(?:md|py|svg)", file.read_text()):
            assert (ROOT / named).exists(), f"{file.relative_to(ROOT)} names {named}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_paths_exist(page):
    text = prose(page)
    roots = (ROOT, ROOT / "titanplans") if page.name == "architecture.md" else (ROOT,)
    for path in re.findall(r"`((?:\w+/)+[\w.-]*)`", text):
        if path.split("/")[0] not in ELSEWHERE:
            assert any((root / path).exists() for root in roots), f"{page.name} names {path}"


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_readme_links_to_every_page(page):
    assert f"(docs/{page.name})" in (ROOT / "README.md").read_text()
