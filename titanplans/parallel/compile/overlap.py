"""Two graph passes around inductor's `micro_pipeline_tp`, the pass that fuses collectives with matrix products.

`Expose` runs before it, and rewrites products so that they can be fused. `Overlap` runs after it, and overlaps the
collectives that were not fused with independent products.
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
"""Collectives at the borders of a region."""

_LAYOUTS = (*VIEWS, "permute", "t", "transpose", "clone", "convert_element_type", "_to_copy")
"""Operators that change only the layout or dtype of the input of a product."""


class Overlap(graph_pass()):  # pyrefly: ignore[invalid-inheritance]
    """An inductor pass that runs `overlap` after `micro_pipeline_tp`."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        overlap(graph)

    def uuid(self) -> Any:
        return None  # under async tensor parallelism no graph is cached


def overlap(graph: torch.fx.Graph) -> None:
    """Reorder `graph` so that independent products run between each collective that was not fused and its wait.

    The gradient of a region's input is a sum over its projections, and `micro_pipeline_tp` fuses no reduce-scatter of a sum.
    But the weight gradients of the projections do not depend on the result of that reduce-scatter. So each collective is
    issued as soon as its input is computed, independent products follow, then the wait, as in Megatron-LM's Linear
    (Korthikanti et al. 2022, "Reducing Activation Recomputation", section 4.2.2). Only the order of operators changes, not
    their results.

    Inductor's `aten_distributed_optimizations.enable_overlap_scheduling` uses estimated times, which need a GPU. This order
    depends only on the graph.
    """
    windows: list[tuple[torch.fx.Node, torch.fx.Node]] = []
    for start in [node for node in graph.nodes if operation(node) is not None and not is_fused(node.target)]:
        if (wait := wait_of(start)) is not None:
            _sink(start, wait)
            _fill(start, windows)
            windows.append((start, wait))
    after: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for start, wait in windows:
        if products := overlapped(start):
            # Ordering the first and the last product is enough: the others stay between them.
            after.setdefault(products[0], []).append(start)
            after[wait] = [products[-1]]
    keep_order(graph, after)


def _sink(start: torch.fx.Node, wait: torch.fx.Node) -> None:
    """Move `wait` before the first use of the collective's result; to the end, if no product uses or overlaps it yet."""
    order = _order(wait.graph)
    min(wait.users, key=order.__getitem__).prepend(wait)
    descendants = reached(wait, "users")
    if overlapped(start) or any(is_long(node) or operation(node) for node in descendants):
        return
    (output,) = wait.graph.find_nodes(op="output")
    for node in (wait, *sorted(descendants - {output}, key=order.__getitem__)):
        output.prepend(node)


def _fill(start: torch.fx.Node, windows: Sequence[tuple[torch.fx.Node, torch.fx.Node]]) -> None:
    """Let independent products run between `start` and its wait: issue `start` earlier, or run the products later.

    If the collective reduce-scatters a sum of gradients, the weight gradients of the same projections are delayed;
    otherwise all independent products of the region. No product is delayed beyond the region's border, since its inputs
    would stay in memory until then.

    Args:
        start: the node that issues a collective.
        windows: the collectives that are overlapped already, each with its wait.
    """
    order, ancestors = _order(start.graph), reached(start, "all_input_nodes")
    is_overlapped = bool(overlapped(start))
    before = [node for node in order if order[node] < order[start]]
    independent = [node for node in before if is_long(node) and node not in ancestors]
    if not any(is_long(node) or operation(node) for node in ancestors):
        if independent and not is_overlapped:
            _advance(start, ancestors, independent, order)
        return
    border = max((order[node] for node in before if operation(node) in _BORDERS), default=-1)
    # A product that overlaps another collective stays before the wait of that collective.
    taken = {
        product for other, wait in windows if order[wait] < order[start] for product in overlapped(other)
    }
    movable = [node for node in independent if order[node] > border and node not in taken]
    summands = chains(start.all_input_nodes, "all_input_nodes")
    sources = {source for chain in summands for source in _sources(chain.product)}
    # An input gradient and the weight gradient of one projection have the same source, the gradient of the output.
    weight_gradients = [product for product in movable if sources & _sources(product)]
    _delay(start, weight_gradients if weight_gradients or is_overlapped else movable, order)


def _advance(
    start: torch.fx.Node,
    ancestors: Collection[torch.fx.Node],
    independent: Sequence[torch.fx.Node],
    order: Mapping[torch.fx.Node, int],
) -> None:
    """Move `start` and its `ancestors` to the beginning of the region of the last product of `independent`."""
    borders = [order[node] for node in order if operation(node) in _BORDERS]
    begin = max((position for position in borders if position < order[independent[-1]]), default=-1)
    first = next(node for node in independent if order[node] > begin)
    for node in sorted((node for node in ancestors if order[node] > order[first]), key=order.__getitem__):
        first.prepend(node)
    first.prepend(start)


def _delay(
    start: torch.fx.Node, products: Collection[torch.fx.Node], order: Mapping[torch.fx.Node, int]
) -> None:
    """Move `products`, and their descendants that precede `start`, after `start`."""
    moved = {*products, *(node for product in products for node in reached(product, "users"))}
    for node in sorted(moved, key=order.__getitem__, reverse=True):
        if order[node] < order[start]:
            start.append(node)


def _sources(product: torch.fx.Node) -> set[torch.fx.Node]:
    """Return the inputs of a product; operators that only change an input's layout or dtype are skipped."""

    def source(node: torch.fx.Node) -> torch.fx.Node:
        while name_of(node) in _LAYOUTS:
            node = node.all_input_nodes[0]
        return node

    return {source(node) for node in product.all_input_nodes}


def _order(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    return {node: position for position, node in enumerate(graph.nodes)}


_aten = torch.ops.aten


class Expose(graph_pass()):  # pyrefly: ignore[invalid-inheritance]
    """An inductor pass that rewrites products of gathered sequences, so that `micro_pipeline_tp` can then fuse more of
    them.

    `micro_pipeline_tp` fuses only the sequence of operators reshape, mm, reshape, from the gathered sequence to a matrix
    and back. It does not match a mixture of experts, which works on flattened tokens without the last reshape, nor a
    product with a bias, which is the single operator addmm. Both are rewritten into that sequence; the products and sums
    stay the same.
    """

    def __call__(self, graph: torch.fx.Graph) -> None:
        for gather in [node for node in graph.nodes if operation(node) == "all_gather"]:
            full = edge(gather)
            for tokens in [user for user in full.users if name_of(user) == "reshape"]:
                for product in list(tokens.users):
                    _expose(product, tokens, full)

    def uuid(self) -> Any:
        return None  # graphs are not cached under async tensor parallelism


def _expose(product: torch.fx.Node, tokens: torch.fx.Node, full: torch.fx.Node) -> None:
    """Rewrite `product` if it multiplies `tokens`, the flattened tokens of the gathered sequence `full`."""
    bias, *factors = product.args if name_of(product) == "addmm" else (None, *product.args)
    if name_of(product) not in ("mm", "addmm") or factors[0] is not tokens or product.kwargs:
        return
    sequence, matrix = full.meta["val"].shape, product.meta["val"].shape
    shape = [*sequence[:-1], matrix[-1]]
    if list(tokens.meta["val"].shape) != [matrix[0], sequence[-1]]:
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
        result = put(_aten.reshape.default, put(_aten.mm.default, *factors), shape, like=sequences)
        if bias is not None:
            result = put(_aten.add.Tensor, result, bias, like=sequences)
        result = put(_aten.reshape.default, result, list(matrix))
    product.replace_all_uses_with(result)
    graph.erase_node(product)
