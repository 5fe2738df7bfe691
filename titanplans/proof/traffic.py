"""Which collectives a forward and a backward issue, how large each is, and in which module.

What of it is too much is said in plans/proof/communication_bound.py.

Autograd numbers its nodes in the order in which the forward makes them. Remembering at which number
each module was entered and left, hooks and all, the node that issues a collective in the backward
names the module in whose forward it was made. torch's `CommDebugMode` is not used: it knows no
sizes, and it books a collective of the backward on the module whose outputs' gradients came last,
so a region's reduce-scatter on one of its projections, and the gather where the stream begins on the
first block's norm, as if it were the block's own.

Seen is what reaches the dispatcher, so it works on a process group, on ranks simulated in one process,
and, ten times as fast, on one rank whose peers do not exist (`simulate.fake_ranks`): under a `FakeTensorMode`
no size is too large there. Not seen is what a compiled graph has fused: count before compile. A
checkpointed block, which issues its forward's collectives again, is refused.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanplans.errors import PlanError
from titanplans.observe.operators import NAMESPACES, operation_of, ranks_of, received, size_of


class Collective(NamedTuple):
    """One collective, as one rank issues it."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, ...; of these min_reduce takes the least, as float8's scales need."""

    module: str | None
    """Fully qualified name of the innermost module in whose forward, or in the backward of whose
    forward, it stands; of a hook on a parameter's gradient, the parameter's; "" for the model's own,
    None outside of the model."""

    backward: bool

    elements: int
    """Of the whole tensor: what is gathered, summed up, or to be scattered; as the published formulas count."""

    bytes: int
    """Of the whole tensor."""

    ranks: int
    """Size of the process group."""

    @property
    def received(self) -> int:
        """Bytes that each rank receives on a ring."""
        return received(self.operation, self.bytes, self.ranks)


@contextmanager
def record_collectives(model: nn.Module) -> Iterator[list[Collective]]:
    """Record the collectives of what runs inside, in order, by the modules of `model`.

    Raises:
        PlanError: a module is called again in the backward (activation checkpointing).
    """
    places = _Places(model)
    recorder = _Recorder(places)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            # Before and after the hooks that are there, since collectives stand in those.
            before = module.register_forward_pre_hook(partial(places.enter, name), prepend=True)
            hooks.callback(before.remove)
            hooks.callback(module.register_forward_hook(places.leave).remove)
        with recorder:
            yield recorder.collectives


class _Places:
    """Where the forward is, and where it was when autograd made a node."""

    def __init__(self, model: nn.Module):
        self.stack: list[str] = []
        self._owners = {id(param): name.rpartition(".")[0] for name, param in model.named_parameters()}
        self._numbers: list[int] = []
        self._modules: list[str | None] = []
        self._note()

    def enter(self, name: str, module: nn.Module, args: Any) -> None:
        if _in_backward():
            raise PlanError(
                f"{name} ({type(module).__name__}) is called again in the backward: count the communication "
                "without activation checkpointing, which adds its forward's collectives to every plan alike"
            )
        self.stack.append(name)
        self._note()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())
        self._modules.append(self.module)

    @property
    def module(self) -> str | None:
        """The innermost module whose forward runs."""
        return self.stack[-1] if self.stack else None

    def of_node(self) -> str | None:
        """The innermost module in whose forward the node was made whose backward runs."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        if isinstance(leaf := getattr(node, "variable", None), torch.Tensor):
            return self._owners.get(id(leaf))
        place = bisect_right(self._numbers, node._sequence_nr())
        return self._modules[place - 1] if place else None


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, places: _Places):
        super().__init__()
        self.places = places
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: it issues collectives on local tensors
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace in NAMESPACES and (operation := operation_of(func, args)) is not None:
            # Inputs and outputs of whatever operator: the whole tensor is the largest of them.
            sizes = [size_of(argument) for argument in (*args, *kwargs.values(), result)]
            elements, size = max(sizes)
            backward = _in_backward()
            module = self.places.of_node() if backward else self.places.module
            ranks = ranks_of(func, args, kwargs)
            self.collectives.append(Collective(operation, module, backward, elements, size, ranks))
        return result


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
