"""Records the collectives of inductor's graphs, and which of them are fused or overlapped with matrix products.

record = install_record()
...  # compile, run forward and backward
record.graphs[0]
"""

from typing import Any

import torch
import torch.fx

from titanplans.observe.chains import operation, overlapped
from titanplans.observe.operators import Collective, describe
from titanplans.torch_private.compile import LAST_PASSES, custom_passes, graph_pass, set_custom_passes


def is_backward(graph: torch.fx.Graph) -> bool:
    """Whether `graph` is a backward, whose incoming gradients AOTAutograd names "tangents"."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


class GraphRecord(graph_pass()):  # pyrefly: ignore[invalid-inheritance]
    """A custom pass of inductor that records each graph and does not change it. Made by `install_record`.

    It is the last custom pass, after the pass that fuses collectives (`micro_pipeline_tp_pass`).
    """

    def __init__(self) -> None:
        self.graphs: list[tuple[Collective, ...]] = []
        """The collectives of each graph, in the order in which inductor finished the graphs."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        phase, collectives = "backward" if is_backward(graph) else "forward", []
        for node in graph.nodes:
            if operation(node) is not None:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), _value)
                collective = describe(node.target, args, kwargs, node.meta.get("val"))
                assert collective is not None  # it has an operation
                is_overlapped = not collective.fused and bool(overlapped(node))
                collectives.append(collective._replace(phase=phase, overlapped=is_overlapped))
        self.graphs.append(tuple(collectives))

    def uuid(self) -> Any:
        # A graph from a cache of compiled code would not go through this pass. Without an id for this pass, inductor uses
        # neither its cache of graphs nor AOTAutograd's.
        return None

    def collectives(self, group: tuple[int, ...]) -> list[Collective]:
        """Return the collectives of all graphs over the process group of these ranks."""
        return [c for graph in self.graphs for c in graph if c.group == group]


def install_record() -> GraphRecord:
    """Record inductor's graphs from now on, after the user's custom passes; return the installed record if there is one."""
    record = installed_record()
    if record is None:
        record = GraphRecord()
        set_custom_passes(LAST_PASSES, [*custom_passes(LAST_PASSES), record])
    return record


def installed_record() -> GraphRecord | None:
    """Return the record that is installed in this process, or None."""
    return next((p for p in custom_passes(LAST_PASSES) if isinstance(p, GraphRecord)), None)


def _value(node: torch.fx.Node) -> Any:
    """Return the fake tensor of `node`."""
    # A node that a pass has inserted has no fake tensor yet; it has the size of its first input.
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return node.meta["val"]
