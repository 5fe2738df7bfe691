"""From a collective of one of inductor's graphs to the matrix products beside it: which, and over which operators.

A gather is followed to what reads its result, a scatter back to what made its input. What belongs to the
collective itself, how shards become a whole and a whole shards, does not count as a step.
"""

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.fx

from titanplans.observe.graph_collectives import kind_of

_aten = torch.ops.aten
_PRODUCTS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_mm.default,
)
_WORDS = {
    "_scaled_mm": "float8 product",
    "_to_copy": "cast",
    "_unsafe_view": "view",
    "add": "sum",
    "addmm": "addmm, a product with its bias",
    "baddbmm": "baddbmm, a product of batches with its bias",
    "bmm": "bmm, a product of batches",
    "cat": "concatenation",
    "clone": "copy",
    "constant_pad_nd": "padding",
    "convert_element_type": "cast",
    "div": "quotient",
    "mul": "product element by element",
    "permute": "transpose",
    "reshape": "view",
    "squeeze": "view",
    "t": "transpose",
    "unsqueeze": "view",
}
"""Operators in words; others by their names."""


class Chain(NamedTuple):
    """The way from a collective to the product next to it."""

    steps: tuple[torch.fx.Node, ...]
    """What stands between, from the collective on."""

    product: torch.fx.Node


def is_product(node: torch.fx.Node) -> bool:
    """Whether a node is a matrix product, in any form that a Linear takes."""
    return node.op == "call_function" and node.target in _PRODUCTS


def name_of(node: torch.fx.Node) -> str:
    """Return the name of a node's operator, without namespace and overload; of other nodes, what they are."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op


def words(node: torch.fx.Node) -> str:
    """Return a node's operator in words."""
    name = name_of(node)
    return _WORDS.get(name, name)


def chains(collective: torch.fx.Node) -> list[Chain]:
    """Return the ways to the products beside a gather or scatter, the shortest first, each product once.

    Over no other product or collective.
    """
    gathers, start = _is(collective, "all_gather"), edge(collective)
    waiting: deque[Chain] = deque(Chain((), node) for node in (start.users if gathers else [start]))
    seen, found = {start}, []
    while waiting:
        chain = waiting.popleft()
        node = chain.product
        if is_product(node):
            found.append(chain)
        elif node.op == "call_function" and kind_of(node) is None:
            for other in node.users if gathers else node.all_input_nodes:
                if other not in seen:
                    seen.add(other)
                    waiting.append(Chain((*chain.steps, node), other))
    return found


def edge(collective: torch.fx.Node) -> torch.fx.Node:
    """Return the node where what belongs to a collective ends: a gather's whole result, or a scatter's whole input."""
    if _is(collective, "all_gather"):
        (wait,) = collective.users
        wholes = {cat for piece in wait.users for cat in _cats(piece)}
        return wholes.pop() if len(wholes) == 1 else wait
    node = collective.args[0]
    assert isinstance(node, torch.fx.Node)
    if name_of(node) == "cat" and len(wholes := {_whole(piece) for piece in node.all_input_nodes}) == 1:
        return wholes.pop() or node
    return node


def summed(node: torch.fx.Node) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """Return the products whose sum `node` is, and what else is added to them."""
    terms = list(_terms(node))
    return [term for term in terms if is_product(term)], [term for term in terms if not is_product(term)]


def _terms(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """What `node` is the sum of, views and casts aside; itself if it is none."""
    name = name_of(node)
    if name in ("reshape", "view", "convert_element_type"):
        yield from _terms(node.all_input_nodes[0])
    elif name == "add":
        for part in node.all_input_nodes:
            yield from _terms(part)
    else:
        yield node


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


def _is(node: torch.fx.Node, operation: str) -> bool:
    kind = kind_of(node)
    return kind is not None and kind[0] == operation
