"""The collectives of inductor's finished graphs, and which of them were fused or overlapped with matrix products.

    record = install_record()
    ...  # compile, run forward and backward
    record.graphs[0]

A graph is read in inductor's last hook for passes of one's own, after the pass that fuses (`micro_pipeline_tp_pass`).
A graph that comes out of a compile cache never passes there. So while a record is installed inductor leaves out its
cache of graphs, and AOTAutograd's with it. `fusible` reads the operators between a collective and its product.
"""

from typing import Any

import torch
import torch.fx

from titanplans.observe.chains import operation, overlapped
from titanplans.observe.operators import Collective, describe
from titanplans.torch_private.compile import LAST_PASSES, graph_pass, own_passes, set_own_passes


def is_backward(graph: torch.fx.Graph) -> bool:
    """Whether `graph` is a backward: AOTAutograd calls the gradients that come in "tangents"."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


class GraphRecord(graph_pass()):  # pyrefly: ignore[invalid-inheritance]
    """A hook of inductor's that changes nothing, and records each graph. Made by `install_record`."""

    def __init__(self) -> None:
        self.graphs: list[tuple[Collective, ...]] = []
        """The collectives of each, in the order in which inductor finished them."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        phase, found = "backward" if is_backward(graph) else "forward", []
        for node in graph.nodes:
            if operation(node) is not None:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
                collective = describe(node.target, args, kwargs, node.meta.get("val"))
                assert collective is not None  # it has an operation
                meanwhile = not collective.fused and bool(overlapped(node))
                found.append(collective._replace(phase=phase, overlapped=meanwhile))
        self.graphs.append(tuple(found))

    def uuid(self) -> Any:
        return None  # inductor caches no graph that has passed a hook without one

    def collectives(self, group: tuple[int, ...]) -> list[Collective]:
        """Return the collectives of all graphs over the process group of these ranks."""
        return [c for graph in self.graphs for c in graph if c.group == group]


def install_record() -> GraphRecord:
    """Record inductor's graphs from now on, behind the user's own hooks; a record that is installed stays the one."""
    record = installed_record()
    if record is None:
        record = GraphRecord()
        set_own_passes(LAST_PASSES, [*own_passes(LAST_PASSES), record])
    return record


def installed_record() -> GraphRecord | None:
    """Return the record that is installed in this process."""
    return next((p for p in own_passes(LAST_PASSES) if isinstance(p, GraphRecord)), None)


def _value(node: torch.fx.Node) -> Any:
    """A node's value; those that a pass puts in have none yet, and the size of their first input."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return node.meta["val"]
