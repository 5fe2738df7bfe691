"""The collectives of inductor's finished graphs, and which of them were fused or overlapped with matrix products.

    with recording_graphs() as record:
        ...  # compile, run forward and backward
    record.graphs[0].collectives

A graph is read in inductor's last hook for passes of one's own, after the pass that fuses (`micro_pipeline_tp_pass`).
A graph that comes out of a compile cache never passes there. So while a record is installed inductor leaves out its
cache of graphs, and AOTAutograd's with it. `async_tp` reads the operators between a collective and its product.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.fx

from titanplans.errors import ParallelError
from titanplans.observe.async_tp.chains import is_long, overlapped
from titanplans.observe.guard import Guard
from titanplans.observe.operators import Collective, describe, operation_of
from titanplans.torch_private.compile import LAST_PASSES, compile_id, graph_pass, own_passes, set_own_passes
from titanplans.torch_private.dispatch import OpOverload


class Graph(NamedTuple):
    """One graph, as far as it is known."""

    compile_id: str
    """dynamo's number of the frame and of its compilation, such as "0/0"; forward and backward share it."""

    backward: bool
    collectives: tuple[Collective, ...]


def collectives_of(graph: torch.fx.Graph) -> tuple[Collective, ...]:
    """Return the collectives of one of inductor's graphs, in order, without modules.

    Raises:
        NotImplementedError: a communication operator that is not in the table.
    """
    phase, found = "backward" if is_backward(graph) else "forward", []
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and operation_of(node.target) is not None:
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
            collective = describe(node.target, args, kwargs, node.meta.get("val"))
            assert collective is not None  # it has an operation
            meanwhile = not collective.fused and any(map(is_long, overlapped(node)))
            found.append(collective._replace(phase=phase, overlapped=meanwhile))
    return tuple(found)


def is_backward(graph: torch.fx.Graph) -> bool:
    """Whether `graph` is a backward: AOTAutograd calls the gradients that come in "tangents"."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


class GraphRecord(graph_pass()):  # pyrefly: ignore[invalid-inheritance]
    """A hook of inductor's that changes nothing, and records each graph. Made by `install_record`."""

    def __init__(self) -> None:
        self.graphs: list[Graph] = []
        """In the order in which inductor finished them."""
        self.guard = Guard()
        """Of reading; after a failure the record is incomplete."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.guard(self._read, graph)

    def _read(self, graph: torch.fx.Graph) -> None:
        self.graphs.append(Graph(compile_id(), is_backward(graph), collectives_of(graph)))

    def uuid(self) -> Any:
        return None  # inductor caches no graph that has passed a hook without one

    def collectives(self, group: tuple[int, ...] | None = None) -> list[Collective]:
        """Return the collectives of all graphs, or those over the process group of these ranks."""
        return [c for graph in self.graphs for c in graph.collectives if group in (None, c.group)]


def install_record() -> GraphRecord:
    """Record inductor's graphs from now on; a hook of the user's own stays, and runs before.

    One record is installed in a process: a second call returns it.
    """
    return installed_record() or _append(GraphRecord())


def installed_record() -> GraphRecord | None:
    """Return the record that is installed in this process."""
    return next((p for p in own_passes(LAST_PASSES) if isinstance(p, GraphRecord)), None)


@contextmanager
def recording_graphs() -> Iterator[GraphRecord]:
    """Record the graphs that inductor finishes inside; a record that is installed stays.

    Raises:
        ParallelError: another hook was put in the record's place, so graphs went unseen.
    """
    record = _append(GraphRecord())
    try:
        yield record
        if record not in own_passes(LAST_PASSES):
            raise ParallelError(
                "torch._inductor.config.post_grad_custom_post_pass was replaced while graphs were recorded, and some went "
                "unseen: append to the existing hooks, or set it before"
            )
    finally:
        set_own_passes(LAST_PASSES, [p for p in own_passes(LAST_PASSES) if p is not record])


def _append(record: GraphRecord) -> GraphRecord:
    set_own_passes(LAST_PASSES, [*own_passes(LAST_PASSES), record])
    return record


def _value(node: torch.fx.Node) -> Any:
    """A node's value; those that a pass puts in have none yet, and the size of their first input."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return node.meta["val"]
