"""Of each collective of a captured block: with which products it was fused, or what stands between."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch.fx

from titanplans.cli.async_tp.capture import Captured
from titanplans.cli.async_tp.chains import chains, edge, is_product, summed, words
from titanplans.observe.graph_collectives import kind_of

BEGINS = "no product is next to it: the gradient of what comes before the sharded stream"
"""What becomes of the backward's gather where the stream begins."""

_MIRRORED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


class Verdict(NamedTuple):
    """What became of one collective of a block."""

    operation: str
    backward: bool

    place: str
    """Module within the block, and whether the region is entered ("in") or left ("out") there; "" if not known."""

    fused: bool

    products: tuple[str, ...]
    """Modules whose products it is fused with, or stands beside."""

    obstacle: str
    """Why it is not fused, in words, or which products beside it are not; "" for neither."""

    possible: bool
    """Whether it is fused, or would be in another graph; False: torch's pass has no form for it."""


def verdicts(captured: Sequence[Captured], modules: Mapping[str, str]) -> list[Verdict]:
    """Return what became of each collective of a block, forward and then backward, in the order of issue.

    Args:
        captured: the block's graphs.
        modules: by `str(id(module))`, each module's name within the block.
    """
    names, region, found = _Names(modules), "", []
    by_number: dict[int, list[Verdict]] = {}
    for graph in sorted((g for g in captured if not g.backward), key=lambda g: g.number):
        for node in graph.collectives:
            # A region is left where it was entered: a hook behind a graph break knows no module.
            region = names.region(node) or region
            found.append(_verdict(graph, node, region, names))
            by_number.setdefault(graph.number, []).append(found[-1])
    for graph in sorted((g for g in captured if g.backward), key=lambda g: -g.number):
        forward = list(reversed(by_number.get(graph.number, [])))
        for node in graph.collectives:
            operation = _operation(node)
            # A backward's collective is the mirror image of a forward's.
            of = next((v for v in forward if v.operation == _MIRRORED.get(operation, operation)), None)
            if of is not None:
                forward.remove(of)
                found.append(_verdict(graph, node, of.place.rpartition(" ")[0], names))
            else:
                found.append(Verdict(operation, True, "", False, (), BEGINS, False))
    return found


def _verdict(graph: Captured, node: torch.fx.Node, region: str, names: "_Names") -> Verdict:
    operation = _operation(node)
    place = ""
    if region:
        place = f"{region} {'in' if (operation == 'all_gather') != graph.backward else 'out'}"
    if operation not in _MIRRORED:
        reason = f"the pass fuses no {operation.replace('_', '-')}"
        return Verdict(operation, graph.backward, place, False, (), reason, False)
    beside = graph.beside[node]
    fused = names.of((p for p in beside if p._erased), region)
    if node._erased:
        left = names.of((p for p in beside if not p._erased), region)
        rest = f"not with {', '.join(left)}" if left else ""
        return Verdict(operation, graph.backward, place, True, fused, rest, True)
    if fused:
        again = "fused, and issued by itself as well, for what the backward keeps"
        return Verdict(operation, graph.backward, place, False, fused, again, True)
    products, obstacle, possible = _in_the_way(node, graph.backward, names, region)
    return Verdict(operation, graph.backward, place, False, products, obstacle, possible)


def _in_the_way(
    node: torch.fx.Node, backward: bool, names: "_Names", region: str
) -> tuple[tuple[str, ...], str, bool]:
    """Return the products beside a collective that is left, why it is left, and whether that could be otherwise."""
    gathers = _operation(node) == "all_gather"
    if not gathers:
        terms, others = summed(edge(node))
        if len(terms) > 1:
            products = names.of(terms, region)
            added = (
                " and of what comes from another graph" if any(o.op == "placeholder" for o in others) else ""
            )
            of = f" ({', '.join(products)})" if products else ""
            return products, f"a sum of {len(terms)} products{of}{added}, and the pass takes one", False
    if not (found := chains(node)):
        where = "its result leaves" if gathers else "its input comes into"
        return (), f"{where} the graph without a product: a graph break parts them", True
    nearest = [chain for chain in found if len(chain.steps) == len(found[0].steps)]
    products = names.of((chain.product for chain in nearest), region)
    steps = [names.step(step) for step in found[0].steps]
    if (last := words(found[0].product)) != "mm":
        steps = [*steps, last]
    between = ", ".join(dict.fromkeys(steps)) or "nothing"
    kept = gathers and not backward and any(user.op == "output" for user in edge(node).users)
    saved = "; its result is saved for the backward, too" if kept else ""
    return products, f"{between} between it and {' and '.join(products) or 'its product'}{saved}", True


def _operation(node: torch.fx.Node) -> str:
    kind = kind_of(node)
    assert kind is not None
    return kind[0]


class _Names:
    """Which module a node belongs to, by what dynamo noted."""

    def __init__(self, modules: Mapping[str, str]):
        self.modules = modules

    def module(self, node: torch.fx.Node) -> str:
        """Return the innermost module's name within the block; "" for the block's own, or if it is not known."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for key in reversed(stack):
            if (name := self.modules.get(str(key).partition("@")[0])) is not None:
                return name
        return ""

    def region(self, node: torch.fx.Node) -> str:
        """Return the module at whose border a collective stands: the block's child."""
        return self.module(node).partition(".")[0]

    def of(self, nodes: Iterable[torch.fx.Node], region: str) -> tuple[str, ...]:
        """Return the modules of products, within their region, each once, in the block's order."""
        those = {name for node in nodes if is_product(node) and (name := self.module(node))}
        return tuple(name.removeprefix(f"{region}.") for name in self.modules.values() if name in those)

    def step(self, node: torch.fx.Node) -> str:
        """Return what a node does, in words; what a norm consists of is the norm."""
        name = self.module(node)
        return f"norm {name}" if "norm" in name.lower() else words(node)
