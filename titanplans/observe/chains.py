"""From a collective of one of inductor's graphs to the matrix products next to it: which, and over which operators.

A gather is followed to what reads its result, a scatter back to what made its input. Operators that only join shards, or
split into them, belong to the collective and count as no step.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch.fx

from titanplans.observe.operators import operation_of
from titanplans.torch_private.compile import in_order
from titanplans.torch_private.dispatch import OpOverload, schema

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
"""Matrix products, in any form that a Linear takes."""

LONG = (*PRODUCTS, "_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward")
"""Operators that take long enough to hide a collective, attention aside: matrix products of any kind."""

VIEWS = ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")

Side = Literal["users", "all_input_nodes"]
"""From a node to its readers, or to its inputs."""


class Chain(NamedTuple):
    """The way from a collective to the product next to it."""

    steps: tuple[torch.fx.Node, ...]
    """The operators between, from the collective on."""

    product: torch.fx.Node


def operation(node: torch.fx.Node) -> str | None:
    """Return the collective that a node issues; None if it is none."""
    return operation_of(node.target) if isinstance(node.target, OpOverload) else None


def name_of(node: torch.fx.Node) -> str:
    """Return the name of a node's operator, without namespace and overload; of other nodes, their kind."""
    node = in_order(node)
    if isinstance(node.target, OpOverload):
        return schema(node.target).name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op


def is_long(node: torch.fx.Node) -> bool:
    """Whether a node multiplies matrices, and so takes long enough to hide a collective behind it."""
    name = name_of(node)
    return name in LONG or name.startswith(("_scaled_dot_product", "flex_attention"))


def chains(nodes: Iterable[torch.fx.Node], side: Side) -> list[Chain]:
    """Return the ways from `nodes` to the next products, over no collective; the shortest first, each product once."""
    waiting = deque(Chain((), node) for node in nodes)
    seen, found = {chain.product for chain in waiting}, []
    while waiting:
        chain = waiting.popleft()
        node = chain.product
        if is_long(node):
            found.append(chain)
        elif node.op == "call_function" and operation(node) is None:
            others = [other for other in getattr(node, side) if other not in seen]
            seen.update(others)
            waiting += [Chain((*chain.steps, node), other) for other in others]
    return found


def neighbours(collective: torch.fx.Node) -> list[Chain]:
    """Return the ways to the products that read a gather's result, or whose result is scattered."""
    if operation(collective) == "all_gather":
        return chains(edge(collective).users, "users")
    return chains([edge(collective)], "all_input_nodes") if operation(collective) == "reduce_scatter" else []


def reached(start: torch.fx.Node, side: Side) -> set[torch.fx.Node]:
    """Return the nodes that depend on `start` ("users"), or on which it depends ("all_input_nodes")."""
    found, waiting = set(), [start]
    while waiting:
        new = set(getattr(waiting.pop(), side)) - found
        found |= new
        waiting += new
    return found


def summed_products(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the products that `node` is a sum of, views and casts aside; itself if it is one."""
    name = name_of(node)
    if name in ("add", "sum", "reshape", "view", "convert_element_type"):
        return [product for part in node.all_input_nodes for product in summed_products(part)]
    addend = summed_products(node.all_input_nodes[0]) if name == "addmm" else []
    return [*addend, node] if is_long(node) else []


def wait_of(start: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node that waits for what `start` issues; None if it is another graph's."""
    return next((user for user in start.users if name_of(user) == "wait_tensor"), None)


def overlapped(start: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the products that stand between a collective and its wait, in order."""
    wait, found, node = wait_of(start), [], start.next
    while wait is not None and node is not wait and node.op != "root":
        found += [node] if is_long(node) else []
        node = node.next
    return found


def edge(collective: torch.fx.Node) -> torch.fx.Node:
    """Return the node where what belongs to a collective ends: a gather's whole result, or a scatter's whole input."""
    if operation(collective) == "all_gather":
        (wait,) = collective.users
        wholes = {cat for piece in wait.users for cat in _cats(piece)}
        return wholes.pop() if len(wholes) == 1 else wait
    node = collective.args[0]
    assert isinstance(node, torch.fx.Node)
    if name_of(node) == "cat" and len(wholes := {_whole(piece) for piece in node.all_input_nodes}) == 1:
        return wholes.pop() or node
    return node


def _cats(piece: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The concatenations of pieces of a gather's result."""
    if name_of(piece) in ("split", "split_with_sizes", "slice"):
        for user in piece.users:
            yield from (cat for cat in (*user.users, user) if name_of(cat) == "cat")


def _whole(piece: torch.fx.Node) -> torch.fx.Node | None:
    """The tensor that a piece belongs to."""
    if name_of(piece) == "slice":
        return piece.all_input_nodes[0]
    if name_of(piece) == "getitem" and name_of(split := piece.all_input_nodes[0]).startswith("split"):
        return split.all_input_nodes[0]
    return None
