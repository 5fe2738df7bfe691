"""Products that read a gathered sequence, in the form that torch's pass `micro_pipeline_tp` finds.

The pass takes a product over a matrix, made of the gathered sequence and made a sequence again: reshape, mm, reshape. A
mixture of experts works on tokens in a row, and leaves the last reshape out; a product with a bias is one operator with
it, addmm. Both are written out here, by the same products and sums.
"""

from typing import Any

import torch
import torch.fx

from titanplans.observe.chains import edge, name_of, operation
from titanplans.torch_private.compile import graph_pass

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
