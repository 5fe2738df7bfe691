"""The operators between a collective and the matrix products next to it, in one of inductor's graphs. Start at `neighbours`.

From an all-gather the search follows the users of its result; from a reduce-scatter it follows the inputs. Operators that
only concatenate or split shards belong to the collective, and are not listed.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch.fx

from titanplans.observe.operators import operation_of
from titanplans.torch_private.compile import unordered_node
from titanplans.torch_private.dispatch import OpOverload, schema

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
"""Names of the matrix products that a Linear may become."""

LONG = (*PRODUCTS, "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward")
"""Names of all matrix products, which take long enough to hide a collective. Attention does, too (see `is_long`)."""

VIEWS = ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")

Side = Literal["users", "all_input_nodes"]
"""The attribute of a node that has its users ("users") or its inputs ("all_input_nodes")."""


class Chain(NamedTuple):
    """A path from a collective to a matrix product next to it."""

    steps: tuple[torch.fx.Node, ...]
    """The operators between them, starting at the collective."""

    product: torch.fx.Node


def operation(node: torch.fx.Node) -> str | None:
    """Return the name of the collective that a node issues; None if it issues none."""
    return operation_of(node.target) if isinstance(node.target, OpOverload) else None


def name_of(node: torch.fx.Node) -> str:
    """Return the name of a node's operator without namespace and overload; of a node without an operator, its kind."""
    node = unordered_node(node)
    if isinstance(node.target, OpOverload):
        return schema(node.target).name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op


def is_long(node: torch.fx.Node) -> bool:
    """Whether a node is a matrix product or attention, which take long enough to hide a collective."""
    name = name_of(node)
    return name in LONG or name.startswith(("_scaled_dot_product", "flex_attention"))


def chains(nodes: Iterable[torch.fx.Node], side: Side) -> list[Chain]:
    """Return the paths from `nodes` to the next products, shortest first: one path for each product.

    A path ends at the first product, and contains no collective.
    """
    # Breadth-first search. The last node of a waiting chain is in `product`, whatever its operator.
    waiting = deque(Chain((), node) for node in nodes)
    seen, paths = {chain.product for chain in waiting}, []
    while waiting:
        chain = waiting.popleft()
        node = chain.product
        if is_long(node):
            paths.append(chain)
        elif node.op == "call_function" and operation(node) is None:
            unseen = [neighbour for neighbour in getattr(node, side) if neighbour not in seen]
            seen.update(unseen)
            waiting += [Chain((*chain.steps, node), neighbour) for neighbour in unseen]
    return paths


def neighbours(collective: torch.fx.Node) -> list[Chain]:
    """Return the paths to the products that use an all-gather's result, or whose result is reduce-scattered."""
    if operation(collective) == "all_gather":
        return chains(edge(collective).users, "users")
    return chains([edge(collective)], "all_input_nodes") if operation(collective) == "reduce_scatter" else []


def reached(start: torch.fx.Node, side: Side) -> set[torch.fx.Node]:
    """Return the nodes that depend on `start` ("users"), or on which it depends ("all_input_nodes")."""
    reachable, waiting = set(), [start]
    while waiting:
        new = set(getattr(waiting.pop(), side)) - reachable
        reachable |= new
        waiting += new
    return reachable


def summed_products(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the products that `node` is a sum of, perhaps viewed or cast; `node` alone if it is a product."""
    name = name_of(node)
    if name in ("add", "sum", "reshape", "view", "convert_element_type"):
        return [product for term in node.all_input_nodes for product in summed_products(term)]
    addend = summed_products(node.all_input_nodes[0]) if name == "addmm" else []
    return [*addend, node] if is_long(node) else []


def wait_of(start: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node that waits for the collective `start`; None if it is in another graph."""
    return next((user for user in start.users if name_of(user) == "wait_tensor"), None)


def overlapped(start: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the matrix products and attentions between a collective and its wait, in order."""
    wait, products, node = wait_of(start), [], start.next
    while wait is not None and node is not wait and node.op != "root":
        products += [node] if is_long(node) else []
        node = node.next
    return products


def edge(collective: torch.fx.Node) -> torch.fx.Node:
    """Return the node of an all-gather's full result, or of a reduce-scatter's full input.

    Collectives work on dimension 0. For another dimension, torch splits and concatenates the all-gather's result, or the
    reduce-scatter's input.
    """
    if operation(collective) == "all_gather":
        (wait,) = collective.users
        results = {cat for user in wait.users for cat in _concatenations(user)}
        return results.pop() if len(results) == 1 else wait
    node = collective.args[0]
    assert isinstance(node, torch.fx.Node)
    if name_of(node) == "cat" and len(inputs := {_split_input(chunk) for chunk in node.all_input_nodes}) == 1:
        return inputs.pop() or node
    return node


def _concatenations(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Yield the nodes that concatenate the outputs of `node`, if it is a split or a slice; else nothing."""
    if name_of(node) in ("split", "split_with_sizes", "slice"):
        for user in node.users:
            yield from (cat for cat in (*user.users, user) if name_of(cat) == "cat")


def _split_input(chunk: torch.fx.Node) -> torch.fx.Node | None:
    """Return the tensor from which a slice or a split makes `chunk`; None if `chunk` is made by another operator."""
    if name_of(chunk) == "slice":
        return chunk.all_input_nodes[0]
    if name_of(chunk) == "getitem" and name_of(split := chunk.all_input_nodes[0]).startswith("split"):
        return split.all_input_nodes[0]
    return None
