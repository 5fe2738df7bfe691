"""Every message of an error of titanplans, as its source has it: `{...}` stands for a value.

    python tests/messages.py        # writes tests/messages.txt

An error is made by its class, by a function that returns one of them (`options.error`, `_dont_fit`), or is a pair of an
option and a reason that a check of options yields. What is put together elsewhere is seen as far as its literals are
in that call.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "messages.txt"
FOLDERS = ("titanplans", "plans")
HELPERS = {"error", "refuse", "refused"}
"""Names of functions and of arguments that make an error of the words that they get."""
MISMATCHES = {"Mismatch", "NotFused"}
"""Errors of other modules whose words a user reads."""


def files() -> list[Path]:
    """Return the files whose messages are collected."""
    return sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


@cache
def tree(file: Path) -> ast.Module:
    """Return what `file` says."""
    return ast.parse(file.read_text())


@cache
def classes() -> frozenset[str]:
    """Return the names of the classes of errors."""
    found = ast.walk(tree(ROOT / "titanplans" / "errors.py"))
    return frozenset({node.name for node in found if isinstance(node, ast.ClassDef)} | MISMATCHES)


def messages(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the class or the function that is called, or the option at fault, and its words."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in classes() or name in HELPERS or name in makers():
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                texts = list(filter(None, map(template, arguments)))
                if words := [text for text in texts if " " in text.strip()]:
                    option = "" if texts[0] in words else f" {texts[0].strip()}"
                    yield name + option, " | ".join(words)
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple) and len(node.value.elts) == 2:
            option, why = map(template, node.value.elts)
            if " " in why:
                yield f"refuses {option or ast.unparse(node.value.elts[0])}", why


@cache
def makers() -> frozenset[str]:
    """Return the functions that are annotated to return an error."""
    return frozenset(
        node.name
        for file in files()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef) and node.returns is not None
        if ast.unparse(node.returns).strip("'\"") in classes()
    )


def template(node: ast.expr) -> str:
    """Return the literal text of an expression, with `{...}` for what is computed; "" if it has none."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            value.value if isinstance(value, ast.Constant) else f"{{{ast.unparse(value.value)}}}"
            for value in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        texts = [template(part) for part in (node.left, node.right)]
        if any(texts):
            parts = zip(texts, (node.left, node.right), strict=True)
            return "".join(text or f"{{{ast.unparse(part)}}}" for text, part in parts)
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, map(template, (node.body, node.orelse))))
    if isinstance(node, ast.BoolOp):
        return " / ".join(filter(None, map(template, node.values)))
    return ""


def page() -> str:
    """Return tests/messages.txt."""
    blocks = []
    for file in files():
        found = list(
            dict.fromkeys(f"    {name}: {' '.join(words.split())}" for name, words in messages(file))
        )
        if found:
            blocks.append("\n".join([str(file.relative_to(ROOT)), *found]))
    return "\n".join(blocks) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
