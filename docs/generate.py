"""Writes the pages of docs/generated/, which are generated from the code, and the pictures.

python docs/generate.py                    # all but the slow pages; two minutes
python docs/generate.py options.md         # only this page
python docs/generate.py --slow             # also the pages that compile or interpret every architecture; an hour
python docs/generate.py --check            # writes nothing; exit status 1 if a page is stale
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "generated"


def page_of(module: str) -> Callable[[], str]:
    """Return a function that returns the page of a module in tests/ or docs/."""
    return lambda: import_module(module).page()


def combinations() -> str:
    """Return the page of all combinations of options. The page needs only which are refused, so none is run."""
    module = import_module("tests.support.pages.combinations")
    return module.page({each: module.refusal(each) for each in module.ALL})


PAGES = {
    FOLDER / "options.md": page_of("options"),
    FOLDER / "models.md": page_of("tests.support.pages.models"),
    FOLDER / "architectures.md": page_of("tests.support.pages.architectures"),
    FOLDER / "combinations.md": combinations,
    ROOT / "docs" / "block.svg": lambda: import_module("draw_block").picture(),
    ROOT / "docs" / "house.svg": lambda: import_module("draw_house").picture(),
    ROOT / "docs" / "cuts.svg": lambda: import_module("draw_cuts").picture(),
    ROOT / "docs" / "pipeline.svg": lambda: import_module("draw_pipeline").picture(),
    ROOT / "docs" / "rows.svg": lambda: import_module("draw_rows").picture(),
}
SLOW = {
    "graphs.md": "tests.support.pages.graphs",
    "async_tp.md": "tests.support.pages.async_tp",
    "kernels.md": "tests.support.pages.kernels",
}
"""Pages whose programs compile or interpret every architecture. Tests compare them, since they are too slow for --check."""


def main(argv: list[str] | None = None) -> int:
    """Write or check the pages that `argv` names; return the exit status."""
    sys.path[:0] = [str(ROOT), str(ROOT / "docs")]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [*(page.name for page in PAGES), *SLOW]
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"one of {', '.join(names)}")
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is stale")
    parser.add_argument("--slow", action="store_true", help=f"{' and '.join(SLOW)}, too")
    options = parser.parse_args(argv)
    if unknown := set(options.pages) - set(names):
        parser.error(f"no such page: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    chosen = options.pages or [*(page.name for page in PAGES), *(SLOW if options.slow else ())]
    if options.check and (slow := SLOW.keys() & set(chosen)):
        parser.error(f"{', '.join(sorted(slow))}: tests compare these pages; --check can't")
    stale = [
        page for page, make in PAGES.items() if page.name in chosen and update_page(page, make, options.check)
    ]
    for page in stale:
        print(
            f"{page.relative_to(ROOT)} {'is stale: python docs/generate.py' if options.check else 'written'}"
        )
    for name, module in SLOW.items():
        if name in chosen:
            subprocess.run([sys.executable, "-m", module, "--page"], cwd=ROOT, check=True)
    return int(options.check and bool(stale))


def update_page(page: Path, make: Callable[[], str], check: bool) -> bool:
    """Write a page if it differs from what its program returns, unless `check` is set; return whether it differs."""
    text = make()
    if page.exists() and page.read_text() == text:
        return False
    if not check:
        page.write_text(text)
    return True


if __name__ == "__main__":
    sys.exit(main())
