"""A training step over ranks is that of one process: the one comparison of all tests that say so.

    CASES = {"tp 4": Case(build, functools.partial(split, tp=4)), …}
    differences = equals_one_process(CASES, ranks=4)       # {} if all are

Every rank trains the whole model on the whole batch, and its part of a second one on its rows. Loss, gradient norm,
every gradient, and every weight after the step are to be the same, on every rank, but for the order of sums.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support import process_groups

ROWS = 4


class Tolerance(NamedTuple):
    """What the order of sums may do, relative to the value; of a gradient, relative to its tensor's largest number."""

    loss: float
    norm: float
    gradient: float


FLOAT32 = Tolerance(1e-6, 1e-5, 1e-4)
"""Sums of a few hundred terms in another order are some tens of epsilons (1.2e-7) off; a gradient that was summed once
too often, or not at all, is off by 1."""
BFLOAT16 = Tolerance(1e-2, 3e-2, 1e-1)
"""8 bits of mantissa: a product is off by up to 2^-9, a step of four layers by a few of these, and the smaller numbers
of a gradient by some tens."""


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def of_sequences(part: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return the loss of whole sequences, whose gradient is that of this rank's `part`."""
    whole = part.detach().clone()
    dist.all_reduce(whole, group=mesh.get_mesh("cp").get_group())
    return part + (whole - part.detach())


def clip(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, 1.0)


class Parallel(NamedTuple):
    """How a rank trains its part; by default, how one process trains the whole."""

    model: nn.Module
    group: dist.ProcessGroup | None = None
    """The ranks that have rows of their own; None where all have the same."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = summed_cross_entropy
    """Of logits and labels, the sum over the labels."""
    context: Callable[[], Any] = contextlib.nullcontext
    """Around the loss and the backward."""
    norm: Callable[[Iterable[nn.Parameter]], torch.Tensor] = clip
    """Returns the norm of all gradients, and may clip them by it."""


class Case(NamedTuple):
    """Both functions, or partials of them, are pickled: they are found in their files by name."""

    build: Callable[[], nn.Module]
    """Return the whole model, the same each time and everywhere."""
    parallelise: Callable[[nn.Module], Parallel]
    length: int = 16
    vocabulary: int = 32
    tolerance: Tolerance = FLOAT32
    rows: int = ROWS


class Trained(NamedTuple):
    """What a step left."""

    loss: torch.Tensor
    norm: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    """As the optimizer reads them."""
    weights: dict[str, torch.Tensor]


def by_torchtitan(model: nn.Module, tp: int, **options: Any) -> Parallel:
    """Return `model` over meshes of torchtitan's, in float32 and with gathered logits."""
    from tests.support.torchtitan_meshes import parallel_dims
    from titanplans.parallel import FSDP2Config, parallelize

    precision = {"mixed_precision_param": "float32", "mixed_precision_reduce": "float32"}
    config = FSDP2Config(disable_loss_parallel=True, **precision, **options)
    dims = parallel_dims(1, -1, 1, tp, 1, 1, dist.get_world_size())
    parallelize(model, parallel_dims=dims, config=config)
    batch = dims.get_optional_mesh("batch")
    return Parallel(model, batch and batch.get_group())


def cases_of(
    options: dict[Any, dict[str, Any]],
    build: Callable[..., nn.Module],
    split: Callable[..., Parallel],
    **shape: Any,
) -> dict[Any, Case]:
    """Return the cases of `options` by (kind, tp, ...): `build(kind)`, split by `split(model, tp=tp, **options)`."""
    return {
        name: Case(functools.partial(build, name[0]), functools.partial(split, tp=name[1], **given), **shape)
        for name, given in options.items()
    }


def equals_one_process(cases: dict[Any, Case], ranks: int) -> dict[Any, str]:
    """Return how the step of each case differs from that of one process, where it does, on any rank."""
    found: list[dict[Any, str]] = process_groups.run(functools.partial(_all, cases=cases), ranks)
    return {name: error for errors in found for name, error in errors.items()}


def _all(rank: int, cases: dict[Any, Case]) -> list[dict[Any, str]]:
    errors = {}
    for name, case in cases.items():
        torch._dynamo.reset()
        try:
            check(case, train(Parallel(case.build()), case))
        except AssertionError as error:
            errors[name] = f"rank {rank}: {error}"
    return process_groups.gather_objects(errors)


def check(case: Case, expected: Trained) -> float:
    """Return the worst error of a gradient, relative to the largest number of its tensor.

    Raises:
        AssertionError: the step is not that of one process.
    """
    return compare(train(case.parallelise(case.build()), case), expected, case.tolerance)


def compare(found: Trained, expected: Trained, tolerance: Tolerance) -> float:
    """As `check`, of a step that was trained."""
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance.loss, atol=0, check_dtype=False)
    torch.testing.assert_close(found.norm, expected.norm, rtol=tolerance.norm, atol=0, check_dtype=False)
    assert found.weights.keys() == expected.weights.keys()
    worst = 0.0
    for name, gradient in expected.gradients.items():
        if gradient is None:
            assert found.gradients[name] is None, f"{name}: a gradient of a weight that has none"
            continue
        largest, weight = gradient.abs().max(), expected.weights[name]
        error = ((found.gradients[name] - gradient).abs().max() / largest).item()
        assert error < tolerance.gradient, f"{name}: its gradient is {error:.1e} of its largest number off"
        worst = max(worst, error)
        # A step of SGD with a learning rate of 1 takes the gradient away, and rounds as the weight does.
        off, rounding = (found.weights[name] - weight).abs().max(), torch.finfo(weight.dtype).eps
        assert off < tolerance.gradient * largest + rounding * weight.abs().max(), f"{name}: {off:.1e} off"
    return worst


def train(parallel: Parallel, case: Case) -> Trained:
    """Train one step, by SGD: AdamW's would be the gradient's sign, which hides a wrong length."""
    model, group = parallel.model, parallel.group
    ids, labels = batch(case, group)
    with parallel.context():
        logits = model(input_ids=ids, use_cache=False).logits
        loss = parallel.loss(logits, labels) / (case.rows * case.length)
        loss.backward()
    loss = whole(loss)
    if group:
        dist.all_reduce(loss, group=group)
    norm = whole(parallel.norm(model.parameters()))
    parameters = {plain(name): parameter for name, parameter in model.named_parameters()}
    gradients = {name: None if p.grad is None else whole(p.grad) for name, p in parameters.items()}
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return Trained(loss, norm, gradients, {name: whole(p) for name, p in parameters.items()})


def batch(case: Case, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels of this rank's rows, `[rows, length]` each."""
    rank, parts = (group.rank(), group.size()) if group else (0, 1)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(case.vocabulary, (case.rows, case.length + 1), generator=generator)
    rows = rows.chunk(parts)[rank]
    return rows[:, :-1], rows[:, 1:]


def plain(name: str) -> str:
    """Return a parameter's name without what torch's checkpoint wrapper adds."""
    return name.replace("_checkpoint_wrapped_module.", "")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of all of the tensor."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
