"""A plan against the unsharded model, all ranks in one process (LocalTensorMode).

`compare` gives the worst errors of loss and gradients, in units of what the reference is large.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from plans import apply_plan


class Comparison(NamedTuple):
    loss: float
    gradient: float
    worst: str
    missing: list[str]


@contextmanager
def ranks(number: int) -> Iterator[DeviceMesh]:
    """A TP mesh of simulated ranks."""
    dist.init_process_group("fake", rank=0, world_size=number, store=FakeStore())
    try:
        with LocalTensorMode(number):
            yield init_device_mesh("cpu", (number,), mesh_dim_names=("tp",))
    finally:
        dist.destroy_process_group()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, after checking that every rank has the same."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.reconcile() if isinstance(tensor, LocalTensor) else tensor


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the tokens themselves: enough for every parameter to matter."""
    logits = model(input_ids=tokens, use_cache=False).logits
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def compare(
    build: Callable[[], nn.Module], tokens: torch.Tensor, degree: int, *, plan=None, **options
) -> Comparison:
    reference = build()
    expected = loss_of(reference, tokens)
    expected.backward()
    with ranks(degree) as mesh:
        model = build()
        apply_plan(model, mesh, plan=plan, **options)
        loss = loss_of(model, tokens)
        loss.backward()
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        loss = whole(loss.detach())
    errors = {
        name: ((gradients[name] - p.grad).abs().max() / p.grad.abs().max().clamp_min(1e-30)).item()
        for name, p in reference.named_parameters()
        if name in gradients and p.grad is not None
    }
    worst = max(errors, key=lambda name: errors[name])
    missing = [n for n, p in reference.named_parameters() if p.grad is not None and n not in gradients]
    return Comparison((loss - expected).abs().item() / expected.abs().item(), errors[worst], worst, missing)
