"""From a collective of one of inductor's graphs to the matrix products next to it: which, and over which operators.

A gather is followed to what reads its result, a scatter back to what made its input. What belongs to the
collective itself, how shards become a whole and a whole shards, does not count as a step.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch.fx

from titanplans.observe.operators import operation_of
from titanplans.torch_private import OpOverload, schema

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
"""Matrix products, in any form that a Linear takes."""

VIEWS = ("view", "_unsafe_view", "reshape", "squeeze", "unsqueeze")


class Chain(NamedTuple):
    """The way from a collective to the product next to it."""

    steps: tuple[torch.fx.Node, ...]
    """What stands between, from the collective on."""

    product: torch.fx.Node


def operation(node: torch.fx.Node) -> str | None:
    """Return the collective that a node issues; None if it is none."""
    return operation_of(node.target) if isinstance(node.target, OpOverload) else None


def name_of(node: torch.fx.Node) -> str:
    """Return the name of a node's operator, without namespace and overload; of other nodes, what they are."""
    if isinstance(node.target, OpOverload):
        return schema(node.target).name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op


def chains(collective: torch.fx.Node) -> list[Chain]:
    """Return the ways to the products next to a gather or scatter, the shortest first, each product once.

    Over no other product or collective.
    """
    gathers, start = operation(collective) == "all_gather", edge(collective)
    waiting: deque[Chain] = deque(Chain((), node) for node in (start.users if gathers else [start]))
    seen, found = {start}, []
    while waiting:
        chain = waiting.popleft()
        node = chain.product
        if name_of(node) in PRODUCTS:
            found.append(chain)
        elif node.op == "call_function" and operation(node) is None:
            for other in node.users if gathers else node.all_input_nodes:
                if other not in seen:
                    seen.add(other)
                    waiting.append(Chain((*chain.steps, node), other))
    return found


def adjacent(collective: torch.fx.Node) -> tuple[torch.fx.Node, ...]:
    """Return the products that read a gather's result, or whose result is scattered, with nothing but a view between."""
    if operation(collective) not in ("all_gather", "reduce_scatter"):
        return ()
    return tuple(c.product for c in chains(collective) if all(name_of(step) in VIEWS for step in c.steps))


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


def summed_products(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Return the products that `node` is a sum of, views and casts aside; itself if it is one."""
    name = name_of(node)
    if name in ("add", "reshape", "view", "convert_element_type"):
        return [product for part in node.all_input_nodes for product in summed_products(part)]
    return [node] if name in PRODUCTS else []


def _cats(piece: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """The concatenations of pieces of what a gather gives."""
    if name_of(piece) in ("split", "split_with_sizes", "slice"):
        for user in piece.users:
            yield from (cat for cat in (*user.users, user) if name_of(cat) == "cat")


def _whole(piece: torch.fx.Node) -> torch.fx.Node | None:
    """What a piece is one of."""
    if name_of(piece) == "slice":
        return piece.all_input_nodes[0]
    if name_of(piece) == "getitem" and name_of(split := piece.all_input_nodes[0]).startswith("split"):
        return split.all_input_nodes[0]
    return None
