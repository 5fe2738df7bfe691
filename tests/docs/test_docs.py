"""Every Python block of the docs runs, every TOML block is a job, a sweep or a family that loads; links lead somewhere."""

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
"""First parts of paths outside this repository: another project's, or files that a job writes."""
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
    for number, block in enumerate(blocks(page, "python"), 1):
        exec(compile(block, f"{page.name}, Python block {number}", "exec"), namespace)


@pytest.mark.thorough
def test_the_way_from_a_folder_to_a_folder_works_as_it_stands(tmp_path):
    """Its blocks in order, each program in a process of its own: Python (py), a job, commands (sh).

    The last block is a new process, which has imported nothing of titanplans.
    """
    text = (ROOT / "docs" / "weights.md").read_text()
    section = text[text.index("## From a folder to a folder") : text.index("## Start from a folder")]
    *found, (last, reads) = BLOCK.findall(section)
    assert ([language for language, _ in found], last) == (["py", "toml", "sh"], "py")
    (_, builds), (_, job), (_, commands) = found
    (tmp_path / "tuned.toml").write_text(job)
    for message, by in [([builds], python), *((message, None) for message in titanplans(commands))]:
        jobs.output(message, tmp_path, by)
    command = [sys.executable, "-"]
    done = subprocess.run(command, input=reads, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(done.stdout.rsplit(" ", 1)[1]) > 0.01


def titanplans(commands: str) -> list[list[str]]:
    """Return the words of each line; each line must be a command of titanplans."""
    lines = [shlex.split(line, comments=True) for line in commands.splitlines()]
    assert {line[0] for line in lines} == {"titanplans"}
    return [line[1:] for line in lines]


def python(words: list[str]) -> None:
    exec(words[0], {"__name__": "__main__"})


@pages_with("toml")
def test_toml_blocks_load(page, tmp_path, monkeypatch):
    from titanplans.cli.sweep import read_sweep
    from titanplans.config import load_job
    from titanplans.config.families import read_family

    monkeypatch.chdir(ROOT)  # a sweep names its base job

    for number, block in enumerate(blocks(page, "toml"), 1):
        job = tmp_path / f"{number}.toml"
        job.write_text(block)
        if "[sweep]" in block:
            assert not any(cell.refusal for cell in read_sweep(str(job))[1])
        elif block.startswith("config_class"):
            assert read_family(job).flavors
        else:
            load_job([str(job)])


@pytest.mark.parametrize("page", LINKING, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", prose(page)):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Return what GitHub makes of a page's headings: lower case, hyphens for spaces, no punctuation."""
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
    """Pages of documentation that errors, docstrings and comments name; `make gpu` writes those of docs/gpu."""
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
