"""Private names of other libraries are used in one package or under a mark. Canaries test names that could break silently.

If a release removes a name, its import or call fails, and the tests of its users show this. The canaries are for names whose
removal raises no error: an attribute that torch no longer uses, or one for which titanplans has a default.
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
    *("_attn_implementation", "_keys_to_ignore_on_load_unexpected", "_tp_size"),
    *("_initialize_weights", "_init_weights", "_get_dtype_plan"),
    "_megatron_fsdp_model",
    "_reset_parameters",
    *("_run_exitfuncs", "_actions"),
    "_generate_tables",
    *("_readout_basis", "_rotate_atom", "_rotate_modal_pos", "_rotate_modal_neg"),
    "_get_D",
    *("_LangPatchScope", "_patch_builtin", "_patch_lang", "_patch_lang_core", "_patch_lang_tensor"),
}
"""Private names of transformers, fla, megatron-fsdp, atexit, argparse and Triton's interpreter, a method of torch's
modules, and a method that authors of data sets override in a builder of `datasets`."""
PUBLIC_TABLES = {"_parameters", "_modules", "_buffers", "_asdict", "_replace", "_fields"}
"""nn.Module's tables, which torch documents for code that walks modules, and the methods of named tuples."""
LIBRARIES = ("torch", "torchtitan", "torchao")
MARK = "# private: "
MARKED = {
    "titanplans/foresight/pipeline.py": 4,
    "titanplans/parallel/fsdp/construction.py": 2,
    "titanplans/parallel/fsdp/gradient_sync.py": 3,
    "titanplans/parallel/fsdp/sharding.py": 2,
    "titanplans/training/pipeline/stage.py": 2,
}
"""The number of marks by file. A mark covers a function, or a line, that uses internals of torch or torchtitan."""


@pytest.fixture(scope="module", autouse=True)
def group():
    with process_group("cpu", timeout=timedelta(minutes=7)):
        yield


def test_disabled_torch_function():
    """torch still uses this attribute. Otherwise each operation on a weight of a split model would go through Python."""

    class Ours(torch.Tensor):
        __torch_function__ = dispatch.disabled_torch_function

    assert type(torch.zeros(1).as_subclass(Ours) + 1) is torch.Tensor


def test_shared_shardings():
    """Otherwise each rank of a proof would repeat DTensor's sharding propagation, which takes a tenth of its time."""
    mesh = DeviceMesh("cpu", [0])
    with threads.meshes_by_thread():
        equal_mesh = DeviceMesh("cpu", [0])
    assert mesh != equal_mesh
    propagator = DTensor._op_dispatcher.sharding_propagator
    with threads.shared_shardings():
        assert "propagate_op_sharding_non_cached" in vars(propagator)
        for each_mesh in (mesh, equal_mesh):
            tensor = DTensor.from_local(torch.ones(3, 5), each_mesh, [Replicate()])
            assert (tensor + tensor).device_mesh is each_mesh
            assert torch.equal((tensor + tensor).to_local(), torch.full((3, 5), 2.0))
    assert "propagate_op_sharding_non_cached" not in vars(propagator)


def sharded():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def test_reshard_to():
    """Otherwise resharding to fewer ranks would make two process groups for each FSDP module."""
    model = sharded()
    first, second = fsdp.fsdp_group(model[0]), fsdp.fsdp_group(model[1])
    sharding._reshard_to(second, first.post_forward_mesh_info)
    assert second.fsdp_params[0].post_forward_mesh_info is first.post_forward_mesh_info
    model(torch.ones(1, 2)).sum().backward()


def test_compilations():
    """Otherwise a block that should be compiled but ran eagerly would go unnoticed."""
    torch.compiler.reset()
    hits = []

    def hook(hit):
        hits.append(hit)
        return hit

    compile.limit_compilations(1000)
    assert compile.set_guard_hook(hook) is None
    try:
        before = len(compile.compilations())
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        compiled(torch.ones(1))
        compiled(torch.ones(1))
        (compilation,) = compile.compilations()[before:]
    finally:
        assert compile.set_guard_hook(None) is hook
        compile.limit_compilations(None)
    assert (compilation.fail_type, compilation.fail_reason, compilation.has_guarded_code) == (
        None,
        None,
        True,
    )
    assert str(compilation.compile_id) == "0/0"
    assert hits == [True]


def test_is_disabled():
    """Otherwise FLA's kernels would break graphs in the middle of a module."""
    disabled = torch.compiler.disable(sharded)
    assert compile.is_disabled(disabled)
    assert not compile.is_disabled(sharded)
    assert compile.enabled_function(disabled) is sharded
    assert compile.enabled_function(sharded) is None


# Where private names are used


def private_names(tree: ast.AST, defined: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the number and the source of each line of a file that uses a private name of another library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            names = (node.module or "").split(".") + [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [component for alias in node.names for component in alias.name.split(".")]
        elif isinstance(node, ast.Attribute):
            written = ast.unparse(node)
            if (
                written.startswith(("torch.ops.", "self.", "cls.", "super().", "os._exit"))
                and written.count("._") == 1
            ):
                continue
            names = [] if node.attr in PUBLIC_TABLES | OTHERS | defined else [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr"):
            name = node.args[1]
            names = (
                [name.value] if isinstance(name, ast.Constant) and name.value not in OTHERS | defined else []
            )
        else:
            continue
        if any(str(component).startswith("_") and not str(component).startswith("__") for component in names):
            yield node.lineno, ast.unparse(node)


def defined_names() -> set[str]:
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
                names.update(
                    constant.value for constant in ast.walk(node.slice) if isinstance(constant, ast.Constant)
                )
    return names


def marked(tree: ast.AST, text: str) -> list[range]:
    """Return the lines that each mark of a file covers: its own line, or the function that has the mark in its signature."""
    lines = [index for index, line in enumerate(text.splitlines(), 1) if MARK in line]
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


def test_private_names_are_in_one_package_or_under_a_mark():
    defined = defined_names()
    unmarked, marks = [], {}
    for file in (ROOT / "titanplans").rglob("*.py"):
        name = str(file.relative_to(ROOT))
        if name.startswith("titanplans/torch_private/"):
            continue
        tree = ast.parse(text := file.read_text())
        covered = marked(tree, text)
        reached = list(private_names(tree, defined))
        unmarked += [
            f"{name}:{line}: {source}" for line, source in reached if not any(line in c for c in covered)
        ]
        if covered:
            marks[name] = len(covered)
    assert not unmarked, "\n".join(unmarked)
    assert marks == MARKED


def test_the_search_finds_private_names():
    text = (ROOT / "titanplans/torch_private/dispatch.py").read_text()
    private = [source for _, source in private_names(ast.parse(text), defined_names())]
    assert any(source.startswith("from torch._subclasses.fake_tensor import") for source in private)
    assert "torch._guards" in private


def test_every_name_has_a_user():
    """A name in the package that nothing imports has to be removed."""
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
    """No module of the package imports the compiler or torchao, and the package itself imports nothing."""
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
