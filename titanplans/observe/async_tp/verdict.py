"""Of each collective of a captured block: with which products it was fused or is overlapped, or why neither."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch.fx

from titanplans.observe.async_tp.capture import Captured
from titanplans.observe.async_tp.chains import (
    chains,
    edge,
    is_alone,
    is_long,
    name_of,
    nearest_products,
    operation,
    summed_products,
)
from titanplans.torch_private.compile import is_erased

BEGINS = "no product reads the gradient of what comes before the sharded stream"
"""The obstacle of the backward's gather there."""

FUSED = "a fused product"
"""The product that a collective is overlapped with, where only another fused operator stands before its wait."""

_MIRRORED = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@dataclass(frozen=True)
class Verdict:
    """What became of one collective of a block."""

    operation: str
    backward: bool

    place: str
    """Module within the block, and whether its region is entered ("in") or left ("out"); "" where the stream begins. Of
    other collectives, the module that issues them."""

    fused: bool

    products: tuple[str, ...]
    """Modules whose products it is fused with, or stands next to."""

    overlapped: tuple[str, ...]
    """Modules whose products run between it and its wait, where it is not fused."""

    obstacle: str
    """Why it is not fused, or which products next to it are not; "" for neither."""

    possible: bool
    """Whether it is fused, or would be in another graph; False: torch's pass does not support it."""

    @property
    def hidden(self) -> bool:
        """Whether products run meanwhile: it is fused with them, or overlapped."""
        return self.fused or bool(self.overlapped)


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
            region = names.module(node).partition(".")[0] or region
            found.append(_verdict(graph, node, region, names))
            by_number.setdefault(graph.number, []).append(found[-1])
    for graph in sorted((g for g in captured if g.backward), key=lambda g: -g.number):
        forward = list(reversed(by_number.get(graph.number, [])))
        for node in graph.collectives:
            issued = str(operation(node))
            # A backward's collective mirrors a forward's, but for the gather of the gradient where the stream begins.
            of = next((v for v in forward if v.operation == _MIRRORED.get(issued, issued)), None)
            if of is not None:
                forward.remove(of)
                region = of.place.rpartition(" ")[0]
            elif issued == "all_gather":
                found.append(
                    Verdict(issued, True, "", False, (), names.meanwhile(graph, node), BEGINS, False)
                )
                continue
            found.append(_verdict(graph, node, region, names))
    return found


def _verdict(graph: Captured, node: torch.fx.Node, region: str, names: "_Names") -> Verdict:
    issued = str(operation(node))
    if issued not in _MIRRORED:
        place = names.module(node)
    else:
        if graph.backward and issued == "reduce_scatter":
            # Regions that share a gather have a scatter each in the backward.
            products = graph.adjacent[node] if is_erased(node) else nearest_products(node)
            region = next(filter(None, (names.module(p).partition(".")[0] for p in products)), region)
        place = f"{region} {'in' if (issued == 'all_gather') != graph.backward else 'out'}" if region else ""
    fused = names.of((p for p in graph.adjacent[node] if is_erased(p)), region)
    if is_erased(node):
        left = names.of((p for p in graph.adjacent[node] if not is_erased(p)), region)
        rest = f"not with {', '.join(left)}" if left else ""
        return Verdict(issued, graph.backward, place, True, fused, (), rest, True)
    meanwhile = names.meanwhile(graph, node, region)
    if fused:
        products, obstacle, possible = fused, "fused, but also issued separately for the backward", True
    else:
        products, obstacle, possible = _obstacle(node, names, region)
    if not meanwhile:
        alone = "every product of its graph is needed for it, or needs it"
        obstacle += (
            f"; not overlapped: {alone if is_alone(node) else 'independent products are beyond its region'}"
        )
    return Verdict(issued, graph.backward, place, False, products, meanwhile, obstacle, possible)


def _obstacle(node: torch.fx.Node, names: "_Names", region: str) -> tuple[tuple[str, ...], str, bool]:
    """Return the products next to a collective, why it is not fused, and whether that could be otherwise."""
    issued = str(operation(node))
    if issued not in _MIRRORED:
        return (), f"{issued.replace('_', '-')}, which is never fused", False
    if issued == "reduce_scatter" and len(terms := summed_products(edge(node))) > 1:
        products = names.of(terms, region)
        among = "" if len(products) == len(terms) else "among them "
        return products, f"a sum of {len(terms)} products ({among}{', '.join(products)})", False
    if not (found := chains(node)):
        return (), "a graph break parts it from its product", True
    nearest = [chain for chain in found if len(chain.steps) == len(found[0].steps)]
    products = names.of((chain.product for chain in nearest), region)
    steps = [names.step(step) for step in found[0].steps]
    if (kind := name_of(found[0].product)) != "mm":
        steps.append(kind)
    between = ", ".join(dict.fromkeys(steps)) or "nothing"
    return products, f"{between} between it and {', '.join(products) or 'its product'}", True


class _Names:
    """Which module a node belongs to, by what dynamo noted."""

    def __init__(self, modules: Mapping[str, str]):
        self.modules = modules

    def module(self, node: torch.fx.Node) -> str:
        """Return the innermost module's name within the block; "" for the block's own, or if it is not known."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        keys = (str(key).partition("@")[0] for key in reversed(stack))
        return next((self.modules[key] for key in keys if key in self.modules), "")

    def of(self, nodes: Iterable[torch.fx.Node], region: str) -> tuple[str, ...]:
        """Return the modules of products, within their region, each once, in the block's order."""
        those = {name for node in nodes if is_long(node) and (name := self.module(node))}
        return tuple(name.removeprefix(f"{region}.") for name in self.modules.values() if name in those)

    def meanwhile(self, graph: Captured, node: torch.fx.Node, region: str = "") -> tuple[str, ...]:
        """Return the modules whose products stand between a collective and its wait."""
        products = graph.overlapped[node]
        return self.of(products, region) or ((FUSED,) if products else ())

    def step(self, node: torch.fx.Node) -> str:
        """Return a node's operator, or the norm that it is a part of."""
        name = self.module(node)
        return name if "norm" in name.lower() else name_of(node)
