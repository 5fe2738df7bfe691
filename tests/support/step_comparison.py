"""Compare a training step over several ranks with the same step in one process.

    CASES = {"tp 4": Case(build, functools.partial(split, tp=4)), …}
    differences = equals_one_process(CASES, ranks=4)       # {} if all are equal

Each rank trains the unsplit model on the full batch, and the parallel model on its own sequences. The loss, the gradient
norm, every gradient, and every weight after the step have to be equal on every rank, up to the order of sums.
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
from titanplans.split.objects import gather_objects

ROWS = 4


class Tolerance(NamedTuple):
    """Allowed relative differences. The error of a gradient is relative to the largest element of the gradient."""

    loss: float
    norm: float
    gradient: float


FLOAT32 = Tolerance(1e-6, 1e-5, 1e-4)
"""Sums of a few hundred terms in another order differ by some tens of epsilons (1.2e-7). A gradient that was summed
twice, or not at all, differs by 1."""
BFLOAT16 = Tolerance(1e-2, 3e-2, 1e-1)
"""For bfloat16, with 8 bits of mantissa. The relative error of a product is at most 2^-9, of the loss after four layers a
few times 2^-9, and of the small elements of a gradient some tens of times 2^-9."""


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def sum_over_cp(local_loss: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Return the loss summed over the context-parallel ranks. Its gradient flows only into `local_loss`."""
    total = local_loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_mesh("cp").get_group())
    return local_loss + (total - local_loss.detach())


def clip(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    return nn.utils.clip_grad_norm_(parameters, 1.0)


class Parallel(NamedTuple):
    """A model, and how a rank trains it. By default it trains as one process does."""

    model: nn.Module
    group: dist.ProcessGroup | None = None
    """The data-parallel ranks, which have different sequences; None if all have the same."""
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = summed_cross_entropy
    """Returns the loss of logits and labels, summed over the labels."""
    context: Callable[[], Any] = contextlib.nullcontext
    """Returns a context in which the loss and the backward run."""
    norm: Callable[[Iterable[nn.Parameter]], torch.Tensor] = clip
    """Returns the norm of all gradients, and may clip them."""


class Case(NamedTuple):
    """A model, how to parallelise it, and its batch. The functions are pickled, so they can't be local functions."""

    build: Callable[[], nn.Module]
    """Returns the unsplit model, with the same values each time and on every rank."""
    parallelise: Callable[[nn.Module], Parallel]
    length: int = 16
    vocabulary: int = 32
    tolerance: Tolerance = FLOAT32
    rows: int = ROWS


class Trained(NamedTuple):
    """Results of a training step, as full tensors."""

    loss: torch.Tensor
    norm: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    """The gradients that the optimizer gets, by parameter name."""
    weights: dict[str, torch.Tensor]


def by_torchtitan(model: nn.Module, tp: int, **options: Any) -> Parallel:
    """Return `model` parallelised over torchtitan's meshes, in float32 and with gathered logits."""
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
    """Return a case for each item of `options`, whose key is (kind, tp, ...).

    The model is `build(kind)`, and `split(model, tp=tp, **arguments)` splits it, with the item's value as arguments.
    """
    return {
        name: Case(
            functools.partial(build, name[0]), functools.partial(split, tp=name[1], **arguments), **shape
        )
        for name, arguments in options.items()
    }


def equals_one_process(cases: dict[Any, Case], ranks: int) -> dict[Any, str]:
    """Return the difference of each case whose step differs, on any rank, from the step of one process."""
    by_rank: list[dict[Any, str]] = process_groups.run(functools.partial(_all, cases=cases), ranks)
    return {name: error for errors in by_rank for name, error in errors.items()}


def _all(rank: int, cases: dict[Any, Case]) -> list[dict[Any, str]]:
    errors = {}
    for name, case in cases.items():
        torch._dynamo.reset()
        try:
            check(case, train(Parallel(case.build()), case))
        except AssertionError as error:
            errors[name] = f"rank {rank}: {error}"
    return gather_objects(errors)


def check(case: Case, expected: Trained) -> float:
    """Return the worst error of a gradient, relative to the largest element of its tensor.

    Raises:
        AssertionError: the step differs from the step of one process.
    """
    return compare(train(case.parallelise(case.build()), case), expected, case.tolerance)


def compare(actual: Trained, expected: Trained, tolerance: Tolerance) -> float:
    """Compare the results of a step as `check` does; return the worst error of a gradient."""
    torch.testing.assert_close(actual.loss, expected.loss, rtol=tolerance.loss, atol=0, check_dtype=False)
    torch.testing.assert_close(actual.norm, expected.norm, rtol=tolerance.norm, atol=0, check_dtype=False)
    assert actual.weights.keys() == expected.weights.keys()
    worst = 0.0
    for name, gradient in expected.gradients.items():
        if gradient is None:
            assert actual.gradients[name] is None, f"{name}: a gradient of a parameter that has none"
            continue
        largest, weight = gradient.abs().max(), expected.weights[name]
        error = ((actual.gradients[name] - gradient).abs().max() / largest).item()
        assert error < tolerance.gradient, f"{name}: its gradient is {error:.1e} of its largest element off"
        worst = max(worst, error)
        # SGD with a learning rate of 1 subtracts the gradient, and rounds to the weight's precision.
        off, rounding = (actual.weights[name] - weight).abs().max(), torch.finfo(weight.dtype).eps
        assert off < tolerance.gradient * largest + rounding * weight.abs().max(), f"{name}: {off:.1e} off"
    return worst


def train(parallel: Parallel, case: Case) -> Trained:
    """Train one step with SGD. AdamW's first step would hide a wrong scale, as it depends only on the gradient's sign."""
    model, group = parallel.model, parallel.group
    ids, labels = batch(case, group)
    with parallel.context():
        logits = model(input_ids=ids, use_cache=False).logits
        loss = parallel.loss(logits, labels) / (case.rows * case.length)
        loss.backward()
    loss = full_copy(loss)
    if group:
        dist.all_reduce(loss, group=group)
    norm = full_copy(parallel.norm(model.parameters()))
    parameters = {unwrapped_name(name): parameter for name, parameter in model.named_parameters()}
    gradients = {name: None if p.grad is None else full_copy(p.grad) for name, p in parameters.items()}
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return Trained(loss, norm, gradients, {name: full_copy(p) for name, p in parameters.items()})


def batch(case: Case, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids and the labels of this rank's sequences, both [sequences, length]."""
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(case.vocabulary, (case.rows, case.length + 1), generator=generator)
    ids = ids.chunk(ranks)[rank]
    return ids[:, :-1], ids[:, 1:]


def unwrapped_name(name: str) -> str:
    """Return a parameter's name without the prefix of torch's checkpoint wrapper."""
    return name.replace("_checkpoint_wrapped_module.", "")


def full_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor`, gathered if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()
