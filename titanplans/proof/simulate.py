"""Simulated ranks: one thread that runs every operation once for each rank, and collectives on the tensors of all.

By `torch.distributed._local_tensor.LocalTensorMode`, whose rough edges are kept inside this file. A plan can't branch on
its rank, since all ranks are one branch: `dist.get_rank()` would be 0 for each of them, and `mesh.get_local_rank()` equal to
no number. Both are refused.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from titanplans.errors import PlanError
from titanplans.proof.modes import by_rank
from titanplans.torch_private.distributed import fake_store
from titanplans.torch_private.dtensor import local_tensor
from titanplans.torch_private.simulated import (
    LocalIntNode,
    LocalTensor,
    LocalTensorMode,
    clear_sharding_cache,
    set_local_tensor,
    simulated_ranks,
)

T = TypeVar("T")


class Simulated:
    """The world (titanplans/proof/world.py) of all simulated ranks."""

    name = "simulated"
    exact = first = True
    ranked = False
    asked: Collection[str] = ()

    def __init__(self, mesh: DeviceMesh):
        self.mesh = mesh

    def settle(self, model: nn.Module) -> None:
        """Give each rank its own copy of every replicated parameter.

        `distribute_tensor` leaves a replica one plain tensor: an update in place would be done to it once for each
        rank, and ranks could never differ.
        """
        for name, param in model.named_parameters():
            local = local_tensor(param) if isinstance(param, DTensor) else param
            if any(isinstance(size, torch.SymInt) for size in local.shape) and torch.__version__ < "2.13":
                raise PlanError(
                    f"{name} has shards of different sizes, which torch {torch.__version__} can't simulate: take threads "
                    '(ranks="threads", --ranks threads), or torch 2.13'
                )
            if isinstance(param, DTensor) and not isinstance(local, LocalTensor):
                copies = {rank: local_tensor(param).detach().clone() for rank in range(self.mesh.size())}
                set_local_tensor(param, LocalTensor(copies))

    def gather(self, tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        for tensor in tensors:
            yield each_rank(tensor.to_local() if isinstance(tensor, DTensor) else tensor, self.mesh.size())

    def gather_objects(self, value: T) -> list[T]:
        return [value]

    def together(self, work: Callable[[], T]) -> T:
        return work()


def run(degree: int, device: torch.device, work: Callable[[Simulated], T]) -> T:
    """Return what `work` returns over `degree` simulated ranks.

    Raises:
        PlanError: this process is a rank already; the model runs a kernel that can't be simulated.
    """
    with ranks(degree, device.type) as mesh:
        return work(Simulated(mesh))


@contextmanager
def ranks(number: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Give a 1-D mesh "tp" of `number` simulated ranks; tensors made under it are one per rank.

    Modules that cache tensors at their first forward (rotary tables) must not have run outside, nor
    run again afterwards: deep-copy a model that never ran.

    Raises:
        PlanError: this process is a rank already.
    """
    # In the world is a second data-parallel replica, too: the default group is not the mesh's.
    with (
        _fake_group(2 * number),
        LocalTensorMode(number),
        by_rank(),
        _addresses_refused(),
        _branches_refused(),
    ):
        yield DeviceMesh(device_type, list(range(number)), mesh_dim_names=("tp",))


@contextmanager
def _addresses_refused() -> Iterator[None]:
    """Refuse kernels that read memory addresses, which a tensor of many ranks does not have."""

    def data_ptr(self: LocalTensor, *_: Any) -> NoReturn:
        raise PlanError(
            "the model runs a kernel that reads memory addresses, which simulated tensors don't have: take threads "
            '(ranks="threads", --ranks threads), or one process a rank under torchrun (--process-group)'
        )

    LocalTensor.data_ptr = data_ptr  # type: ignore[method-assign]
    try:
        yield
    finally:
        del LocalTensor.data_ptr


@contextmanager
def _branches_refused() -> Iterator[None]:
    """Refuse code that asks which rank it is, but that of torch and of this package, which knows of simulated ranks."""

    def refuse(what: str) -> None:
        frame = inspect.currentframe()
        assert frame is not None
        while frame.f_back is not None and frame.f_globals["__name__"] in _ASKED_THROUGH:
            frame = frame.f_back
        who = frame.f_globals["__name__"]
        if who.partition(".")[0] != "torch" and not who.startswith(_KNOWING):
            raise PlanError(
                f"{who} asks {what}, and simulated ranks are all in one branch: take threads "
                '(ranks="threads", --ranks threads), or one process a rank under torchrun (--process-group)'
            )

    def get_rank(group: Any = None) -> int:
        refuse("which rank it is (torch.distributed.get_rank)")
        return rank(group)

    def compared(name: str) -> Callable[[Any, Any], Any]:
        compare = getattr(LocalIntNode, name)

        def by_rank(self: Any, other: Any) -> Any:
            if len({_compare(name, mine, other) for mine in self._local_ints.values()}) > 1:
                refuse("whether its rank, or a size that differs between the ranks, equals a number")
            return compare(self, other)

        return by_rank

    rank, kept = dist.get_rank, {name: getattr(LocalIntNode, name) for name in ("eq", "ne")}
    for name in kept:
        setattr(LocalIntNode, name, compared(name))
    dist.get_rank = get_rank
    try:
        yield
    finally:
        dist.get_rank = rank
        for name, compare in kept.items():
            setattr(LocalIntNode, name, compare)


def _compare(name: str, mine: int, other: Any) -> bool:
    plain = other if isinstance(other, int) else other.maybe_as_int()
    return plain is not None and (mine == plain) == (name == "eq")


_ASKED_THROUGH = ("torch", "torch.fx.experimental.sym_node", "torch.distributed._local_tensor", __name__)
_KNOWING = ("titanplans.tensor_parallel", "titanplans.proof", "titanplans.observe", "titanplans.parallel")


@contextmanager
def fake_ranks(number: int, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """Give a 1-D mesh "tp" of `number` ranks of which this process is the first, and the others do not exist.

    What a collective returns has the right shape and arbitrary values.

    Raises:
        PlanError: this process is a rank already.
    """
    with _fake_group(number):
        yield init_device_mesh(device_type, (number,), mesh_dim_names=("tp",))


@contextmanager
def _fake_group(number: int) -> Iterator[None]:
    refuse_a_rank()
    dist.init_process_group("fake", rank=0, world_size=number, store=fake_store())
    try:
        # DTensor remembers shardings by mesh, and takes a mesh of the same shape for the same one,
        # with a process group that is gone.
        clear_sharding_cache()
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_cache()


def refuse_a_rank() -> None:
    """Refuse a process that is a rank itself.

    Raises:
        PlanError: the default process group exists.
    """
    if dist.is_initialized():
        raise PlanError(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} already, so it can't hold other ranks: "
            'call verify(ranks="process_group"), or destroy the process group first'
        )


def each_rank(tensor: torch.Tensor, number: int) -> list[torch.Tensor]:
    """Return what each simulated rank holds of the local `tensor`, as plain tensors."""
    if isinstance(tensor, LocalTensor):
        return [simulated_ranks(tensor)[rank] for rank in range(number)]
    return [tensor] * number  # made outside the mode: the same on every rank
