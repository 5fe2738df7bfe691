"""Two passes over a graph: what torch's `micro_pipeline_tp` can't fuse is written so that it can, or overlapped.

That pass takes a product over a matrix, made of the gathered sequence and made a sequence again: reshape, mm, reshape. A
mixture of experts works on tokens in a row, and leaves the last reshape out; a product with a bias is one operator with
it, addmm. `Expose` writes both out, by the same products and sums.

The gradient of a region's input is a sum over its projections, and torch's pass `micro_pipeline_tp` fuses no scatter of
a sum. But the projections' weight gradients need nothing of it. So in a finished graph each collective that was not
fused is issued as soon as its input is there, products that are independent of it follow, and the wait stands behind
them, as in Megatron-LM's Linear (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2). The
same operators give the same numbers, in another order.

Inductor's `aten_distributed_optimizations.enable_overlap_scheduling` orders by estimated times, for which it asks a GPU's
driver. Here the order is a matter of the graph alone, and is decided without a GPU.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.fx

from titanplans.observe.chains import (
    VIEWS,
    chains,
    edge,
    is_long,
    name_of,
    operation,
    overlapped,
    reached,
    wait_of,
)
from titanplans.observe.operators import is_fused
from titanplans.torch_private.compile import graph_pass, keep_order

_BORDERS = ("all_gather", "reduce_scatter")
"""Collectives between which a region lies."""

_LAYOUTS = (*VIEWS, "permute", "t", "transpose", "clone", "convert_element_type", "_to_copy")
"""Operators that lay the same numbers out for a product."""


class Overlap(graph_pass()):  # pyrefly: ignore[invalid-inheritance]
    """A hook of inductor's that reorders a graph, after its pass that fuses."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        overlap(graph)

    def uuid(self) -> Any:
        return None  # under async tensor parallelism no graph is cached


def overlap(graph: torch.fx.Graph) -> None:
    """Let products stand between each plain collective of `graph` and its wait, where any is independent of it."""
    windows: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    for start in [node for node in graph.nodes if operation(node) is not None and not is_fused(node.target)]:
        if (wait := wait_of(start)) is not None:
            _sink(start, wait)
            _fill(start, windows)
            windows.append((start, wait))
    after: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for start, wait in windows:
        if held := overlapped(start):
            # The first and the last hold the others between them.
            after.setdefault(held[0], []).append(start)
            after[wait] = [held[-1]]
    keep_order(graph, after)


def _sink(start: torch.fx.Node, wait: torch.fx.Node) -> None:
    """Wait where the result is first read; where no product needs it, and none stands before, at the end."""
    order = _order(wait.graph)
    min(wait.users, key=order.__getitem__).prepend(wait)
    made = reached(wait, "users")
    if overlapped(start) or any(is_long(node) or operation(node) for node in made):
        return
    (output,) = wait.graph.find_nodes(op="output")
    for node in (wait, *sorted(made - {output}, key=order.__getitem__)):
        output.prepend(node)


def _fill(start: torch.fx.Node, windows: Sequence[tuple[torch.fx.Node, torch.fx.Node]]) -> None:
    """Bring products behind `start`: let it begin before those that stand before it, or delay them.

    Where a sum of gradients is scattered, they are the weight gradients of the same projections; else any of the same
    region. None is delayed over the border of a region, since its inputs would be kept that long.

    Args:
        start: issues a collective.
        windows: other collectives, each with its wait, between which products stand already.
    """
    order, needed, held = _order(start.graph), reached(start, "all_input_nodes"), overlapped(start)
    before = [node for node in order if order[node] < order[start]]
    free = [node for node in before if is_long(node) and node not in needed]
    if not any(is_long(node) or operation(node) for node in needed):
        if free and not held:
            _advance(start, needed, free, order)
        return
    border = max((order[node] for node in before if operation(node) in _BORDERS), default=-1)
    # What hides another collective stays before the wait for that.
    bound = {
        product for other, wait in windows if order[wait] < order[start] for product in overlapped(other)
    }
    free = [node for node in free if order[node] > border and node not in bound]
    nearest = chains(start.all_input_nodes, "all_input_nodes")
    read = {source for chain in nearest for source in _sources(chain.product)}
    same = [product for product in free if read & _sources(product)]
    _delay(start, same if same or held else free, order)


def _advance(
    start: torch.fx.Node,
    needed: Collection[torch.fx.Node],
    free: Sequence[torch.fx.Node],
    order: Mapping[torch.fx.Node, int],
) -> None:
    """Move `start` and its inputs to the beginning of the region of the last product of `free`."""
    borders = [order[node] for node in order if operation(node) in _BORDERS]
    begin = max((place for place in borders if place < order[free[-1]]), default=-1)
    first = next(node for node in free if order[node] > begin)
    for node in sorted((node for node in needed if order[node] > order[first]), key=order.__getitem__):
        first.prepend(node)
    first.prepend(start)


def _delay(
    start: torch.fx.Node, products: Collection[torch.fx.Node], order: Mapping[torch.fx.Node, int]
) -> None:
    """Move `products`, and their descendants before `start`, behind `start`."""
    made = {*products, *(node for product in products for node in reached(product, "users"))}
    for node in sorted(made, key=order.__getitem__, reverse=True):
        if order[node] < order[start]:
            start.append(node)


def _sources(product: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the inputs of a product, before operators that change their layout alone."""

    def source(node: torch.fx.Node) -> torch.fx.Node:
        while name_of(node) in _LAYOUTS:
            node = node.all_input_nodes[0]
        return node

    return {source(node) for node in product.all_input_nodes}


def _order(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    return {node: place for place, node in enumerate(graph.nodes)}


_aten = torch.ops.aten


class Expose(graph_pass()):  # pyrefly: ignore[invalid-inheritance]
    """A hook of inductor's that writes products out, before its pass that fuses them."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for gather in [node for node in graph.nodes if operation(node) == "all_gather"]:
            whole = edge(gather)
            for rows in [user for user in whole.users if name_of(user) == "reshape"]:
                for product in list(rows.users):
                    _expose(product, rows, whole)

    def uuid(self) -> Any:
        return None  # graphs are not cached under async tensor parallelism


def _expose(product: torch.fx.Node, rows: torch.fx.Node, whole: torch.fx.Node) -> None:
    """Write `product` out if it multiplies `rows`, the tokens of `whole` in a row."""
    bias, *factors = product.args if name_of(product) == "addmm" else (None, *product.args)
    if name_of(product) not in ("mm", "addmm") or factors[0] is not rows or product.kwargs:
        return
    sequence, matrix = whole.meta["val"].shape, product.meta["val"].shape
    shape = [*sequence[:-1], matrix[-1]]
    if list(rows.meta["val"].shape) != [matrix[0], sequence[-1]]:
        return
    if bias is None and any(
        name_of(u) == "reshape" and list(u.meta["val"].shape) == shape for u in product.users
    ):
        return
    graph = product.graph

    def put(target: Any, *args: Any, like: Any = None) -> torch.fx.Node:
        node = graph.call_function(target, args)
        node.meta = product.meta | {"val": product.meta["val"] if like is None else like}
        return node

    sequences = product.meta["val"].new_empty(shape)
    with graph.inserting_before(product):
        made = put(_aten.reshape.default, put(_aten.mm.default, *factors), shape, like=sequences)
        if bias is not None:
            made = put(_aten.add.Tensor, made, bias, like=sequences)
        made = put(_aten.reshape.default, made, list(matrix))
    product.replace_all_uses_with(made)
    graph.erase_node(product)
