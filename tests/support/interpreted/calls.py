"""Record the calls of FLA's kernels in the layers of tiny models, and compare each kernel with its stand-in.

A call is recorded while a model runs with the stand-ins. Later, kernel and stand-in both compute its forward and its
backward on copies of its arguments.
"""

import functools
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map

from titanplans.kernels import interpreted
from titanplans.kernels.install import use_interpreter
from titanplans.kernels.table import FORMULAS

Compute = Callable[..., Any]

TOLERANCE = 1e-5
"""Relative tolerance in float32: a kernel and its stand-in sum in different orders."""
ROUNDING = 8
"""A larger difference is allowed if the kernel's error is at most this many times the stand-in's, because the kernel sums
block by block. Errors are relative to float64."""


class Call(NamedTuple):
    """A recorded call of a kernel, with copies of its arguments."""

    place: str
    """The key of the kernel in `REFERENCES`."""
    stand_in: Compute
    kernel: Compute
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """A key of shapes, dtypes, document lengths and options. If calls have equal keys, only one of them is
        compared."""
        return f"{self.place} {tree_map(_signature, (self.args, self.kwargs))}"


class Difference(NamedTuple):
    """Relative differences of one tensor: the norm of the difference divided by the norm of the tensor."""

    tensor: str
    """The name of the output or gradient."""
    between: float
    """The difference between the kernel and its stand-in."""
    kernel: float
    """The difference between the kernel and the stand-in in float64."""
    stand_in: float
    """The difference between the stand-in in the call's dtype and in float64."""

    def is_wrong(self, tolerance: float = TOLERANCE) -> bool:
        """Whether rounding in float32 does not explain the difference."""
        return self.between > tolerance and self.kernel > ROUNDING * self.stand_in + tolerance

    def __str__(self) -> str:
        return f"{self.tensor}: {self.between:.1e} apart; from float64 {self.kernel:.1e}, the stand-in {self.stand_in:.1e}"


KERNELS: dict[str, tuple[Compute, Compute]] = {}
"""The stand-in and the kernel, by the kernel's key in `REFERENCES`."""
_calls: list[Call] | None = None
"""The list to which calls are appended; None: calls are not recorded."""
_depth = 0
"""How many stand-ins are running, one inside another. Only calls at depth 0 are recorded."""


def start() -> None:
    """Install stand-ins that record their calls, and the interpreter that `real` enables. Call it before importing FLA."""
    module = sys.modules["titanplans.kernels.install"]
    on_cpu = module._on_cpu

    def recording(reference: Compute, original: Compute | None, *, triton: bool) -> Compute:
        if not triton or original is None:
            return on_cpu(reference, original, triton=triton)
        # `original` may be the `apply` of an autograd.Function
        owner = getattr(original, "__self__", original)
        place = f"{owner.__module__}:{owner.__qualname__}"
        KERNELS[place] = reference, original

        @functools.wraps(reference)
        def record(*args: Any, **kwargs: Any) -> Any:
            global _depth
            if _calls is not None and not _depth:
                _calls.append(Call(place, reference, original, *tree_map(_copy_of, (args, kwargs))))
            _depth += 1
            try:
                return reference(*args, **kwargs)
            finally:
                _depth -= 1

        return on_cpu(record, original, triton=triton)

    module._on_cpu = recording
    interpreted.start()
    use_interpreter(False)
    module._on_cpu = on_cpu


def siblings(call: Call) -> Iterator[Call]:
    """Yield the same call for other kernels of the same recurrence, e.g. `fused_recurrent_kda` for a call of
    `chunk_kda`."""
    folder = call.place.removeprefix("fla.ops.").partition(".")[0]
    places = [f"fla.ops.{folder}.{kind}:{kind}_{folder}" for kind in FORMULAS.get(folder, ())[1:]]
    for place in places if call.place in places else ():
        if place == call.place:
            continue
        arguments = inspect.signature(call.stand_in).bind(*call.args, **call.kwargs).arguments
        arguments |= arguments.pop("kwargs", {})
        stand_in, kernel = KERNELS[place]
        parameters = inspect.signature(stand_in).parameters
        if folder == "gla":
            arguments["gk" if "gk" in parameters else "g"] = arguments.pop("g" if "g" in arguments else "gk")
        yield Call(
            place, stand_in, kernel, (), {name: x for name, x in arguments.items() if name in parameters}
        )


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Yield a list to which the kernel calls in the body are appended."""
    global _calls
    _calls = calls = []
    try:
        yield calls
    finally:
        _calls = None


@contextmanager
def real() -> Iterator[None]:
    """Run kernels instead of their stand-ins in the body, also in a backward that the body runs."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    use_interpreter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # New tensors are filled with NaN, so that elements that the kernel does not write are noticed.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            use_interpreter(False)
            torch.use_deterministic_algorithms(was_deterministic)


@contextmanager
def widened() -> Iterator[None]:
    """Let kernels in the body keep intermediate values in float32, which they otherwise round to 16 bits."""
    interpreted.widen()
    try:
        yield
    finally:
        interpreted.widen(False)


def compare(call: Call, *, states: bool = True) -> list[Difference]:
    """Return the differences of the outputs, and of the gradients of a randomly weighted sum of the outputs.

    A kernel that has no backward is compared by its outputs.

    Args:
        call: the call that kernel and stand-in compute.
        states: whether the sum includes the final states, or only the first output.
    """
    with real():
        try:
            kernel = _computed(call.kernel, call, states)
        except NotImplementedError:  # the kernel has no backward
            call = call._replace(args=_detached(call.args), kwargs=_detached(call.kwargs))
            kernel = _computed(call.kernel, call, states)
    stand_in = _computed(call.stand_in, call, states)
    exact = _computed(call.stand_in, call, states, torch.float64)
    return differences(kernel, stand_in, exact)


def differences(
    kernel: dict[str, torch.Tensor], stand_in: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> list[Difference]:
    """Return, for each tensor of the kernel, its differences from the tensors of the two stand-ins with the same name."""
    return [
        Difference(
            name,
            _distance(x, stand_in[name]),
            _distance(x, exact[name]),
            _distance(stand_in[name], exact[name]),
        )
        for name, x in kernel.items()
    ]


def _computed(
    compute: Compute, call: Call, states: bool, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    leaves: dict[str, torch.Tensor] = {}

    def fresh(path: Any, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        copy = x.detach().clone()
        if dtype is not None and copy.is_floating_point():
            copy = copy.to(dtype)
        if x.requires_grad:
            leaves[_name(path, call)] = copy.requires_grad_()
        return copy

    flat, form = tree_flatten_with_path((call.args, call.kwargs))
    args, kwargs = torch.utils._pytree.tree_unflatten([fresh(path, x) for path, x in flat], form)
    result = compute(*args, **kwargs)
    outputs = [x for _, x in tree_flatten_with_path(result)[0] if isinstance(x, torch.Tensor)]
    generator = torch.Generator().manual_seed(0)
    loss: Any = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
        for x in (outputs if states else outputs[:1])
        if x.requires_grad
    )
    results = {f"output {index}": x.detach() for index, x in enumerate(outputs, 1)}
    if leaves and isinstance(loss, torch.Tensor):
        grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
        results |= {
            f"gradient of {name}": torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
    return results


def _name(path: Any, call: Call) -> str:
    """Return the name of an argument, or its index if the function does not name it."""
    (which, *rest), code = path, getattr(call.stand_in, "__wrapped__", call.stand_in).__code__
    if which.idx == 1:
        return "".join(map(str, rest)).replace("['", "").replace("']", "")
    first, *others = rest
    names = code.co_varnames[: code.co_argcount]
    name = names[first.idx] if first.idx < len(names) else str(first.idx)
    return name + "".join(map(str, others))


def _distance(x: torch.Tensor, y: torch.Tensor) -> float:
    assert x.shape == y.shape, (x.shape, y.shape)
    distance = ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-6)).item()
    return math.inf if math.isnan(distance) else distance


def _detached(values: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, values)


def _signature(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return repr(x)[:60]
    values = x.tolist() if not x.is_floating_point() and x.numel() < 20 else None
    return (tuple(x.shape), str(x.dtype), x.requires_grad, values)


def _copy_of(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    # Inside an autograd.Function gradients are disabled, so a copy that is made there does not require a gradient.
    return x.detach().clone().requires_grad_(x.requires_grad and torch.is_grad_enabled())
