"""The collectives of inductor's final graphs, and which of them were fused with matrix products.

    with recording_graphs() as record:
        ...  # compile, run forward and backward
    record.graphs[0].collectives

`collectives_of(graph)` reads one graph; a `GraphRecord` keeps what it says of each graph that inductor finishes.
What stands between a collective and its product is not known here: that is `titanplans.cli.async_tp.obstacles`'.

A graph is read in inductor's last hook of one's own, after the pass that fuses (`micro_pipeline_tp_pass`). A
graph that comes out of a compile cache never passes there. So while a record is installed inductor's cache of
graphs, and AOTAutograd's with it, is left out by default; with `keep_cache` it stays, and `hidden` tells how
many graphs came out of it unseen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch._inductor.config as config
import torch.fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_custom_graph_passes
from torch.distributed import distributed_c10d

from titanplans.errors import ParallelError

_OPERATIONS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""Operators of `_c10d_functional`, but for suffixes: `_` in place, `_out`, `_coalesced`."""

_FUSED = {
    "fused_all_gather_matmul": "all_gather",
    "fused_all_gather_scaled_matmul": "all_gather",
    "fused_matmul_reduce_scatter": "reduce_scatter",
    "fused_scaled_matmul_reduce_scatter": "reduce_scatter",
}
"""Operators of `symm_mem`; a scaled product is one of float8."""

_NO_DATA = ("wait_tensor",)


class GraphCollective(NamedTuple):
    """One collective of a compiled graph, as one rank issues it."""

    operation: str
    """all_gather, reduce_scatter, all_reduce, ..."""

    backward: bool

    group: str
    """The process group's name, `mesh.get_group().group_name`."""

    fused: bool
    """Replaced by an operator that overlaps it with matrix products."""

    products: int
    """Matrix products of the operator that it was fused with; 0 if it was not."""

    received: int | None
    """Bytes that each rank receives on a ring (see `titanplans.proof.traffic`); None: the graph has symbolic sizes."""


class Graph(NamedTuple):
    """What is known of one graph."""

    compile_id: str
    """dynamo's number of the frame and of its compilation, such as "0/0"; forward and backward share it."""

    backward: bool
    collectives: tuple[GraphCollective, ...]


def collectives_of(graph: torch.fx.Graph) -> tuple[GraphCollective, ...]:
    """Return the collectives of one of inductor's graphs, in order.

    Raises:
        NotImplementedError: a collective that is not known here, which would go uncounted.
    """
    backward, found = is_backward(graph), []
    for node in graph.nodes:
        kind = kind_of(node)
        if kind is None:
            continue
        operation, fused = kind
        given = _arguments(node)
        group = given["group_name"]
        received = _received(node, operation, fused, distributed_c10d._resolve_process_group(group).size())
        products = len(given["Bs"]) if "Bs" in given else int(fused)
        found.append(GraphCollective(operation, backward, str(group), fused, products, received))
    return tuple(found)


def is_backward(graph: torch.fx.Graph) -> bool:
    """Whether `graph` is a backward: AOTAutograd calls the gradients that come in "tangents"."""
    return any(node.name.startswith("tangents") for node in graph.find_nodes(op="placeholder"))


def kind_of(node: torch.fx.Node) -> tuple[str, bool] | None:
    """Return a node's collective operation and whether it is fused with products; None if it is none."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, name = target.namespace, target._schema.name.partition("::")[2]
    if namespace == "symm_mem" and name in _FUSED:
        return _FUSED[name], True
    if namespace != "_c10d_functional" or name in _NO_DATA:
        return None
    plain = name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
    if plain not in _OPERATIONS:
        raise NotImplementedError(f"collective {target} is not known here, so it would go uncounted")
    return _OPERATIONS[plain], False


class GraphRecord(CustomGraphPass):
    """A hook of inductor's that changes nothing, and what it has seen. Made by `install_record`."""

    def __init__(self, keep_cache: bool):
        self.keep_cache = keep_cache
        self.graphs: list[Graph] = []
        """In the order in which inductor finished them."""
        self._hits = _cache_hits()

    def __call__(self, graph: torch.fx.Graph) -> None:
        compile_id = torch._guards.CompileContext.current_compile_id()
        self.graphs.append(Graph(str(compile_id or ""), is_backward(graph), collectives_of(graph)))

    def uuid(self) -> Any:
        # inductor caches no graph that has passed a hook without one.
        return "titanplans.GraphRecord" if self.keep_cache else None

    @property
    def hidden(self) -> int:
        """How many compilations came out of a cache, with graphs that were not seen."""
        return _cache_hits() - self._hits

    def collectives(self, group: str | None = None) -> list[GraphCollective]:
        """Return the collectives of all graphs, or those over the process group of that name."""
        return [c for graph in self.graphs for c in graph.collectives if group in (None, c.group)]


def install_record(*, keep_cache: bool = False) -> GraphRecord:
    """Record inductor's graphs from now on; a hook of the user's own stays, and runs before.

    One record is installed in a process: a second call returns it, without a cache if either asks for that.
    """
    record = installed_record()
    if record is None:
        record = _append(GraphRecord(keep_cache))
    record.keep_cache &= keep_cache
    return record


def installed_record() -> GraphRecord | None:
    """Return the record that is installed in this process."""
    return next((p for p in _hooks() if isinstance(p, GraphRecord)), None)


@contextmanager
def recording_graphs(*, keep_cache: bool = False) -> Iterator[GraphRecord]:
    """Record the graphs that inductor finishes inside, also beside a record that is installed.

    Raises:
        ParallelError: another hook was put in the record's place, so graphs went unseen.
    """
    record = _append(GraphRecord(keep_cache))
    try:
        yield record
        if record not in _hooks():
            raise ParallelError(
                "torch._inductor.config.post_grad_custom_post_pass was set anew while graphs were recorded, and some went "
                "unseen: append to what is there, or set it before"
            )
    finally:
        config.post_grad_custom_post_pass = [p for p in _hooks() if p is not record] or None


def _hooks() -> tuple[Any, ...]:
    return get_custom_graph_passes(config.post_grad_custom_post_pass)


def _append(record: GraphRecord) -> GraphRecord:
    config.post_grad_custom_post_pass = [*_hooks(), record]
    return record


def _cache_hits() -> int:
    # AOTAutograd's cache holds forward and backward together, inductor's each by itself.
    from torch._dynamo.utils import counters

    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args, strict=False)) | node.kwargs


def _received(node: torch.fx.Node, operation: str, fused: bool, ranks: int) -> int | None:
    given = _arguments(node)
    if fused and operation == "all_gather":
        size = _bytes(given["A"]) * ranks
    elif fused:
        a, b = _tensor(given["A"]), _tensor(given["B"])
        size = a.numel() // a.shape[-1] * b.shape[-1] * (given.get("out_dtype") or a.dtype).itemsize
    else:
        size = _bytes(node if operation == "all_gather" else node.args[0])
    if not isinstance(size, int):
        return None  # symbolic
    passes = 2 if operation == "all_reduce" else 1
    return size if operation == "broadcast" else passes * size * (ranks - 1) // ranks


def _bytes(value: Any) -> Any:
    """Bytes of a node's tensor or tensors, or of a list of nodes'."""
    if isinstance(value, (list, tuple)):
        return sum(_bytes(node) for node in value)
    tensors = _tensor(value)
    return sum(
        t.numel() * t.element_size() for t in (tensors if isinstance(tensors, (list, tuple)) else [tensors])
    )


def _tensor(node: torch.fx.Node) -> Any:
    """A node's value; those that the pass puts in have none yet, and the shape of their first input."""
    while "val" not in node.meta:
        node = node.all_input_nodes[0]
    return node.meta["val"]
