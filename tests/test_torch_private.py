"""Private names of other libraries stand in one package or under a mark; canaries for those that would break silently.

A name that a release drops fails where it is imported or called, and the tests of its users show it. A canary stands here
where torch would go on without an error: an attribute that is set and read by nobody, a default for one that is gone.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from tests.support.paths import ROOT
from titanplans.parallel import process_group
from titanplans.parallel.fsdp import sharding
from titanplans.torch_private import (
    compile,
    dispatch,
    fsdp,
    threads,
)

OTHERS = {
    "_no_weight_decay",
    "_no_split_modules",
    *("_attn_implementation", "_keys_to_ignore_on_load_unexpected"),
    *("_initialize_weights", "_get_dtype_plan"),
    "_megatron_fsdp_model",
    "_reset_parameters",
    *("_run_exitfuncs", "_actions"),
    "_generate_tables",
    *("_readout_basis", "_rotate_atom", "_rotate_modal_pos", "_rotate_modal_neg"),
    "_get_D",
    *("_LangPatchScope", "_patch_builtin", "_patch_lang", "_patch_lang_core", "_patch_lang_tensor"),
}
"""Private names of transformers, fla, megatron-fsdp, atexit, argparse and Triton's interpreter, a method that modules of
torch's have, and one that authors of data sets override in a builder of `datasets`."""
PUBLIC_TABLES = {"_parameters", "_modules", "_buffers", "_asdict", "_replace", "_fields"}
"""nn.Module's tables, which it documents for those who walk modules, and the methods of named tuples."""
LIBRARIES = ("torch", "torchtitan", "torchao")
MARK = "# private: "
MARKED = {
    "titanplans/parallel/fsdp/construction.py": 2,
    "titanplans/parallel/fsdp/gradient_sync.py": 4,
    "titanplans/parallel/fsdp/sharding.py": 2,
    "titanplans/training/pipeline/stage.py": 2,
}
"""How many marks a file has: functions, or lines outside of one, that reach into internals of torch or torchtitan."""


@pytest.fixture(scope="module", autouse=True)
def group():
    with process_group("cpu", timeout=timedelta(minutes=7)):
        yield


def test_disabled_torch_function():
    """Else each operation on a weight of a split model goes through Python."""

    class Ours(torch.Tensor):
        __torch_function__ = dispatch.disabled_torch_function

    assert type(torch.zeros(1).as_subclass(Ours) + 1) is torch.Tensor


def test_shared_shardings():
    """Else each rank of a proof finds out again what DTensor does, a tenth of its time."""
    mesh = DeviceMesh("cpu", [0])
    with threads.meshes_by_thread():
        other = DeviceMesh("cpu", [0])
    assert mesh != other
    propagator = DTensor._op_dispatcher.sharding_propagator
    with threads.shared_shardings():
        assert "propagate_op_sharding_non_cached" in vars(propagator)
        for one in (mesh, other):
            tensor = DTensor.from_local(torch.ones(3, 5), one, [Replicate()])
            assert (tensor + tensor).device_mesh is one
            assert torch.equal((tensor + tensor).to_local(), torch.full((3, 5), 2.0))
    assert "propagate_op_sharding_non_cached" not in vars(propagator)


def sharded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def test_reshard_to():
    """Else resharding to some ranks makes two process groups for each unit."""
    model = sharded()
    first, second = fsdp.fsdp_group(model[0]), fsdp.fsdp_group(model[1])
    sharding._reshard_to(second, first.post_forward_mesh_info)
    assert second.fsdp_params[0].post_forward_mesh_info is first.post_forward_mesh_info
    model(torch.ones(1, 2)).sum().backward()


def test_compilations():
    """Else a block that was to be compiled and ran eagerly goes unnoticed."""
    torch.compiler.reset()
    found = []

    def hook(hit):
        found.append(hit)
        return hit

    compile.limit_compilations(1000)
    assert compile.set_guard_hook(hook) is None
    try:
        before = len(compile.compilations())
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        compiled(torch.ones(1))
        compiled(torch.ones(1))
        (made,) = compile.compilations()[before:]
    finally:
        assert compile.set_guard_hook(None) is hook
        compile.limit_compilations(None)
    assert (made.fail_type, made.fail_reason, made.has_guarded_code) == (None, None, True)
    assert str(made.compile_id) == "0/0"
    assert found == [True]


def test_is_disabled():
    """Else FLA's kernels cut graphs in the middle of a module."""
    disabled = torch.compiler.disable(sharded)
    assert compile.is_disabled(disabled)
    assert not compile.is_disabled(sharded)
    assert compile.enabled_function(disabled) is sharded
    assert compile.enabled_function(sharded) is None


# Where private names stand


def private_names(tree: ast.AST, own: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that reach a private name of another library, each with what stands there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            parts = (node.module or "").split(".") + [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            parts = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            written = ast.unparse(node)
            if (
                written.startswith(("torch.ops.", "self.", "cls.", "super().", "os._exit"))
                and written.count("._") == 1
            ):
                continue
            parts = [] if node.attr in PUBLIC_TABLES | OTHERS | own else [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            parts = [name.value] if isinstance(name, ast.Constant) and name.value not in OTHERS | own else []
        else:
            continue
        if any(str(part).startswith("_") and not str(part).startswith("__") for part in parts):
            yield node.lineno, ast.unparse(node)


def own_names() -> set[str]:
    """Return the private names that titanplans itself defines on modules, classes and instances."""
    names = set()
    for file in (ROOT / "titanplans").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
            elif isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(".__dict__"):
                names.update(part.value for part in ast.walk(node.slice) if isinstance(part, ast.Constant))
    return names


def marked(tree: ast.AST, text: str) -> list[range]:
    """Return the lines that each mark of a file covers: its own, or the function in whose signature it stands."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if MARK in line]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [
        next(
            (
                range(f.lineno, (f.end_lineno or 0) + 1)
                for f in functions
                if f.lineno <= line < f.body[0].lineno
            ),
            range(line, line + 1),
        )
        for line in lines
    ]


def test_private_names_stand_in_one_package_or_under_a_mark():
    own = own_names()
    found, marks = [], {}
    for file in (ROOT / "titanplans").rglob("*.py"):
        name = str(file.relative_to(ROOT))
        if name.startswith("titanplans/torch_private/"):
            continue
        tree = ast.parse(text := file.read_text())
        covered = marked(tree, text)
        reached = list(private_names(tree, own))
        found += [f"{name}:{line}: {what}" for line, what in reached if not any(line in c for c in covered)]
        if covered:
            marks[name] = len(covered)
    assert not found, "\n".join(found)
    assert marks == MARKED


def test_the_search_finds_private_names():
    text = (ROOT / "titanplans/torch_private/dispatch.py").read_text()
    found = [what for _, what in private_names(ast.parse(text), own_names())]
    assert "from torch._subclasses.fake_tensor import FakeTensor" in found
    assert "torch._guards" in found


def test_every_name_has_a_user():
    """A name that nothing imports goes."""
    package = ROOT / "titanplans/torch_private"
    files = [f for p in ("titanplans", "tests", "benchmarks") for f in (ROOT / p).rglob("*.py")]
    imported = {
        alias.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("titanplans.torch_private")
        for alias in node.names
    }
    unused = []
    for file in package.glob("*.py"):
        tree = ast.parse(text := file.read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= set(ast.literal_eval(node.value))
        unused += [f"{file.name}: {n}" for n in sorted(names - imported) if text.count(f"{n}(") < 2]
    assert not unused


def test_a_subject_imports_no_other():
    """None of them brings the compiler or torchao, and the package itself brings nothing."""
    code = "\n".join(
        [
            "import sys",
            "import titanplans.torch_private",
            "assert 'torch' not in sys.modules",
            "import titanplans.torch_private.compile, titanplans.torch_private.torchao",
            "found = {'torch._inductor.compile_fx', 'torchao', 'torch.distributed.fsdp._fully_shard'} & {*sys.modules}",
            "assert not found, found",
        ]
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)
