"""Extend Triton's interpreter (triton 3.7 to 3.9) to run the kernels of flash-linear-attention. Start at `complete`.

The interpreter is changed only in this process. Each change has a comment or docstring that says what would fail without
it.
"""

import ast
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import autotuner, interpreter

Handle, Builder = interpreter.TensorHandle, interpreter.InterpreterBuilder

_launch_lock = threading.RLock()
"""Lock around launches. The interpreter's grid, and its position in the grid, are global, and ranks may be threads."""
_rewritten: dict[bool, dict[Any, Any]] = {False: {}, True: {}}
"""The interpreter's cache of rewritten kernels, without and with `widen`."""


def complete() -> None:
    """Extend the interpreter. Call this once per process."""
    autotuner.Autotuner.prune_configs = _first_config
    setattr(autotuner.Autotuner, "do_bench", lambda *_, **__: [0.0])  # noqa: B010  # the original needs a driver
    interpreter.FunctionRewriter.ast_transformer = _Transformer()
    interpreter.__dict__["_cast_number"] = _cast_number
    _patch_language_once()
    _compute_in_bfloat16()
    for name, at in {"create_masked_load": 1, "create_masked_store": 2}.items():
        setattr(Builder, name, _with_bool_mask(getattr(Builder, name), at))
    for names, function in _FUNCTIONS.items():
        for name in names:
            setattr(libdevice, name, _libdevice_function(function))
    setattr(Builder, "create_inline_asm", _inline_assembly)  # noqa: B010  # the original only raises an error
    # The interpreter refuses unknown names of precisions. It computes all of them in float32.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")
    )


def widen(on: bool) -> None:
    """From now on make kernels use float32 instead of 16-bit dtypes and solve systems to convergence, or stop doing so."""
    interpreter.InterpretedFunction.rewritten_fn = _rewritten[on]


_prune_configs = autotuner.Autotuner.prune_configs


def _first_config(self: Any, kwargs: dict[str, Any]) -> list[Any]:
    """Return only the first config that the kernel's pruning keeps, because there is no GPU to time them on."""
    return _prune_configs(self, kwargs)[:1]


class _Transformer(interpreter.ASTTransformer):
    """Rewrites casts by `.to`: in the interpreter loop variables and quotients are Python numbers, which have no `.to`."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if not (isinstance(node.func, ast.Attribute) and node.func.attr == "to"):
            return node
        cast = ast.Name(id="_cast_number", ctx=ast.Load())
        return ast.copy_location(ast.Call(cast, [node.func.value, *node.args], node.keywords), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        # Before triton 3.9, which has visit_Compare, the base class does not visit the value of an assignment.
        if not hasattr(interpreter.ASTTransformer, "visit_Compare"):
            node.value = self.visit(node.value)
        return super().visit_Assign(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if _is_wide() and node.attr in ("float16", "bfloat16"):
            node.attr = "float32"
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        # MesaNet's kernels iterate until squared residuals are below this number.
        if _is_wide() and node.value == 1e-5:
            node.value = 1e-20
        return node


def _is_wide() -> bool:
    return interpreter.InterpretedFunction.rewritten_fn is _rewritten[True]


def _cast_number(x: Any, *args: Any, **kwargs: Any) -> Any:
    return (_tensor(x) if isinstance(x, bool | int | float) else x).to(*args, **kwargs)


def _tensor(x: Any) -> Any:
    return interpreter.interpreter_semantic.to_tensor(x, False)


def _patch_language_once() -> None:
    """Patch the functions of triton.language permanently. The interpreter does so at each call of each function."""
    scope = interpreter._LangPatchScope()
    builder = interpreter.interpreter_builder
    for language in (tl, tl.core):
        interpreter._patch_builtin(language, builder, scope)
        interpreter._patch_builtin(language.tensor, builder, scope)
        interpreter._patch_lang_tensor(language.tensor, scope)
        interpreter._patch_lang_core(language, scope)
    interpreter._patch_builtin(tl.math, builder, scope)
    interpreter._patch_builtin(tl.core.tensor_descriptor_base, builder, scope)
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    launch = interpreter.GridExecutor.__call__

    def launch_alone(executor: Any, *args: Any, **kwargs: Any) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor):
                # Gathers a ShardedSequence before the lock is taken, since other ranks take part in the gather.
                x.data_ptr()
        with _launch_lock:
            launch(executor, *args, **kwargs)

    interpreter.GridExecutor.__call__ = launch_alone


# The interpreter stores bfloat16 as uint16, and numpy would compute with these integers.


def _is_bfloat16(x: Any) -> bool:
    return isinstance(x, Handle | tl.tensor) and x.dtype.scalar == tl.bfloat16


def _widened(x: Any) -> Any:
    if not _is_bfloat16(x):
        return x
    return Handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _narrowed(x: Any) -> Any:
    """Round float32 to the nearest bfloat16, to even."""
    if x.dtype.scalar != tl.float32:
        return x
    bits = np.ascontiguousarray(x.data.astype(np.float32)).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return Handle(np.where(np.isnan(x.data), np.uint16(0x7FC0), rounded), tl.bfloat16)


def _compute_in_bfloat16() -> None:
    def wide(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not any(map(_is_bfloat16, args)):
                return compute(self, *args, **kwargs)
            result = compute(self, *map(_widened, args), **kwargs)
            return _narrowed(result) if result.data.dtype == np.float32 else result

        return call

    for name in (
        "binary_op",
        "unary_op",
        "create_fma",
        "create_rsqrt",
        "create_erf",
        "create_clampf",
        "create_fabs",
    ):
        setattr(Builder, name, wide(getattr(Builder, name)))
    cast, dot = Builder.cast_impl, Builder.create_dot

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar == tl.bfloat16:
            return src if _is_bfloat16(src) else _narrowed(cast(self, src, tl.float32))
        return cast(self, _widened(src), dst_type)

    convert = Builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        if _is_bfloat16(src) or dst_type.scalar == tl.bfloat16:
            return cast_impl(self, src, dst_type)
        return convert(self, src, dst_type, rounding_mode)

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        return dot(self, _widened(a), _widened(b), d, input_precision, max_num_imprecise_acc)

    Builder.cast_impl, Builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    Builder.create_dot = create_dot
    Builder.get_bf16 = lambda self, value: _narrowed(self.get_fp32(value))
    for over in (interpreter.ReduceOps, interpreter.ScanOps):
        over.apply_impl = _over_wide(over.apply_impl)


def _over_wide(apply: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, values: Any) -> Any:
        if not any(map(_is_bfloat16, values)):
            return apply(self, values)
        result = apply(self, tuple(x.to(tl.float32) if _is_bfloat16(x) else x for x in values))
        results = result if isinstance(result, list | tuple) else (result,)
        results = [y.to(tl.bfloat16) if y.dtype.scalar == tl.float32 else y for y in results]
        return results if isinstance(result, list | tuple) else results[0]

    return call


def _with_bool_mask(access: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Cast the mask, argument `at`, to bool. A product of bools is an integer in the interpreter."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        mask = Handle(args[at].data.astype(np.bool_), tl.int1)
        return access(self, *args[:at], mask, *args[at + 1 :], **kwargs)

    return call


def _libdevice_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of CUDA's libdevice that computes with numpy's `function`."""

    def call(*args: Any, **_: Any) -> Any:
        xs = [_tensor(x) for x in args]
        first = xs[0].handle.data
        data = function(*(x.handle.data for x in xs)).astype(first.dtype)
        return tl.tensor(Handle(data, xs[0].dtype.scalar), xs[0].type)

    return call


_FUNCTIONS: dict[tuple[str, ...], Callable[..., Any]] = {
    ("tanh", "fast_tanhf"): np.tanh,
    ("exp", "fast_expf"): np.exp,
    ("exp2",): np.exp2,
    ("log", "fast_logf"): np.log,
    ("log2", "fast_log2f"): np.log2,
    ("cos", "fast_cosf"): np.cos,
    ("sin", "fast_sinf"): np.sin,
    ("log1p",): np.log1p,
    ("expm1",): np.expm1,
    ("pow", "fast_powf"): np.power,
    ("sqrt",): np.sqrt,
    ("rsqrt",): lambda x: 1 / np.sqrt(x),
    ("erf",): lambda x: interpreter.np_erf_fp64(x.astype(np.float64)),
    ("abs",): np.abs,
}
_INSTRUCTIONS = {"tanh": np.tanh, "cos": np.cos, "sin": np.sin, "ex2": np.exp2, "lg2": np.log2} | {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "rcp": np.reciprocal,
}


def _inline_assembly(self: Any, text: str, constraints: Any, values: Any, *_: Any) -> SimpleNamespace:
    """Return the exact result of an approximate PTX instruction in a kernel."""
    function = _INSTRUCTIONS.get(text.strip().partition(".approx")[0])
    if function is None:
        raise NotImplementedError(f"inline assembly {text!r}")
    results = [Handle(function(values[0].data).astype(np.float32), tl.float32)]
    return SimpleNamespace(get_result=results.__getitem__)
