"""Calls of FLA's kernels, as the layers of the tiny models make them, and a comparison of each with what stands in for it.

A call is recorded while a model runs with the stand-ins. Then both compute it, forward and backward, on copies of its
arguments. The kernels' new tensors are filled with NaN, so that a value which nobody wrote shows.
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

ENOUGH = 1e-5
"""Relative, in float32: a kernel and its stand-in sum in other orders."""
ROUNDING = 8
"""Else a kernel, which sums block by block, may be so many times as far from float64 as the stand-in in float32."""


class Call(NamedTuple):
    """A call of a kernel's function."""

    place: str
    """As in `REFERENCES`."""
    stand_in: Compute
    kernel: Compute
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def key(self) -> str:
        """What is the same of calls that show the same: shapes, dtypes, lengths of documents, options."""
        return f"{self.place} {tree_map(_seen, (self.args, self.kwargs))}"


class Difference(NamedTuple):
    """How far a tensor of the kernel is from the stand-in's, and both from the stand-in's in float64: relative, by norms."""

    of: str
    between: float
    kernel: float
    stand_in: float

    def is_wrong(self, enough: float = ENOUGH) -> bool:
        """Whether float32 does not explain it."""
        return self.between > enough and self.kernel > ROUNDING * self.stand_in + enough

    def __str__(self) -> str:
        return f"{self.of}: {self.between:.1e} apart; from float64 {self.kernel:.1e}, the stand-in {self.stand_in:.1e}"


KERNELS: dict[str, tuple[Compute, Compute]] = {}
"""Of each place the stand-in and the kernel."""
_calls: list[Call] | None = None
_inside = 0


def start() -> None:
    """Let kernels be interpreted where `real` says so, and calls be recorded; before anything of FLA is imported."""
    module = sys.modules["titanplans.kernels.install"]
    on_cpu = module._on_cpu

    def recording(reference: Compute, original: Compute | None, *, triton: bool) -> Compute:
        if not triton or original is None:
            return on_cpu(reference, original, triton=triton)
        owner = getattr(original, "__self__", original)  # of an autograd.Function it is `apply`
        place = f"{owner.__module__}:{owner.__qualname__}"
        KERNELS[place] = reference, original

        @functools.wraps(reference)
        def record(*args: Any, **kwargs: Any) -> Any:
            global _inside
            if _calls is not None and not _inside:
                _calls.append(Call(place, reference, original, *tree_map(_copied, (args, kwargs))))
            _inside += 1
            try:
                return reference(*args, **kwargs)
            finally:
                _inside -= 1

        return on_cpu(record, original, triton=triton)

    module._on_cpu = recording
    interpreted.start()
    use_interpreter(False)
    module._on_cpu = on_cpu


def siblings(call: Call) -> Iterator[Call]:
    """Yield the call of each other kernel of a recurrence: `fused_recurrent_kda` of `chunk_kda`, say."""
    folder = call.place.removeprefix("fla.ops.").partition(".")[0]
    places = [f"fla.ops.{folder}.{kind}:{kind}_{folder}" for kind in FORMULAS.get(folder, ())[1:]]
    for place in places if call.place in places else ():
        if place == call.place:
            continue
        given = inspect.signature(call.stand_in).bind(*call.args, **call.kwargs).arguments
        given |= given.pop("kwargs", {})
        stand_in, kernel = KERNELS[place]
        has = inspect.signature(stand_in).parameters
        if folder == "gla":
            given["gk" if "gk" in has else "g"] = given.pop("g" if "g" in given else "gk")
        yield Call(place, stand_in, kernel, (), {name: x for name, x in given.items() if name in has})


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """Collect the calls that the body makes."""
    global _calls
    _calls = found = []
    try:
        yield found
    finally:
        _calls = None


@contextmanager
def real() -> Iterator[None]:
    """Let the body, and what it goes backward through, run the kernels."""
    filled = torch.are_deterministic_algorithms_enabled()
    use_interpreter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills what is empty
        try:
            yield
        finally:
            use_interpreter(False)
            torch.use_deterministic_algorithms(filled)


@contextmanager
def widened() -> Iterator[None]:
    """Let the body's kernels have float32 for what they round to 16 bits on the way."""
    interpreted.widen()
    try:
        yield
    finally:
        interpreted.widen(False)


def compare(call: Call, *, states: bool = True) -> list[Difference]:
    """Return the differences of outputs, and of the gradients of a random sum of them.

    A kernel that has no backward is compared by its outputs.

    Args:
        call: what both compute.
        states: the sum has the final states, too, not the first output alone.
    """
    with real():
        try:
            kernel = _computed(call.kernel, call, states)
        except NotImplementedError:  # it has no backward
            call = call._replace(args=_detached(call.args), kwargs=_detached(call.kwargs))
            kernel = _computed(call.kernel, call, states)
    stand_in = _computed(call.stand_in, call, states)
    exact = _computed(call.stand_in, call, states, torch.float64)
    return differences(kernel, stand_in, exact)


def differences(
    kernel: dict[str, torch.Tensor], stand_in: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]
) -> list[Difference]:
    """Return how far each of the kernel's tensors is from those of its name."""
    return [
        Difference(
            name, _apart(x, stand_in[name]), _apart(x, exact[name]), _apart(stand_in[name], exact[name])
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
    found = compute(*args, **kwargs)
    outputs = [x for _, x in tree_flatten_with_path(found)[0] if isinstance(x, torch.Tensor)]
    generator = torch.Generator().manual_seed(0)
    loss: Any = sum(
        (x.double() * torch.randn(x.shape, generator=generator, dtype=torch.float64)).sum()
        for x in (outputs if states else outputs[:1])
        if x.requires_grad
    )
    results = {f"output {number}": x.detach() for number, x in enumerate(outputs, 1)}
    if leaves and isinstance(loss, torch.Tensor):
        grads = torch.autograd.grad(loss, [*leaves.values()], allow_unused=True)
        results |= {
            f"gradient of {name}": torch.zeros_like(leaf) if grad is None else grad
            for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
        }
    return results


def _name(path: Any, call: Call) -> str:
    """An argument by its name, where the kernel's function has names."""
    (which, *rest), code = path, getattr(call.stand_in, "__wrapped__", call.stand_in).__code__
    if which.idx == 1:
        return "".join(map(str, rest)).replace("['", "").replace("']", "")
    first, *others = rest
    names = code.co_varnames[: code.co_argcount]
    name = names[first.idx] if first.idx < len(names) else str(first.idx)
    return name + "".join(map(str, others))


def _apart(x: torch.Tensor, y: torch.Tensor) -> float:
    assert x.shape == y.shape, (x.shape, y.shape)
    apart = ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-6)).item()
    return math.inf if math.isnan(apart) else apart


def _detached(given: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, given)


def _seen(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return repr(x)[:60]
    values = x.tolist() if not x.is_floating_point() and x.numel() < 20 else None
    return (tuple(x.shape), str(x.dtype), x.requires_grad, values)


def _copied(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    # Within an autograd.Function nothing is differentiated.
    return x.detach().clone().requires_grad_(x.requires_grad and torch.is_grad_enabled())
