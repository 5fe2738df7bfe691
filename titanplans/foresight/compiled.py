"""`rehearse_compiled`: compiled functions in a rehearsal, with the memory and the kernels that they have on a GPU.

Dynamo, AOTAutograd with its partitioner, and Inductor's passes run as in a job. So a graph has the operators of the job's
graph, and the forward keeps what the job's forward keeps. Inductor's last stage, which generates kernels, is replaced by
`CompiledGraph`: it runs the graph on fake tensors, and decides by Inductor's rules which operators are fused.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

from titanplans.config import Compile
from titanplans.observe.storages import StorageRecord
from titanplans.observe.work import Work
from titanplans.torch_private.compile import (
    boxed,
    dynamo_errors,
    functorch_config,
    inductor_config,
    inductor_stages,
    lowered_operators,
    realization_limits,
    register_backend,
)
from titanplans.torch_private.dispatch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    OpOverload,
    schema,
    tree_leaves,
)

BACKEND = "titanplans_rehearsal"
"""The name of the backend of torch.compile that a rehearsal takes instead of the job's."""
_MODELLED = "inductor"
FUSED = "inductor::fused"
"""The name of the operator in the `Work` of a kernel that computes fused operators."""

_LIBRARY = frozenset(("sort", "topk", "kthvalue", "mode", "median"))
"""Operators for which Inductor generates a kernel only if the dimension is short; otherwise it calls a library."""

_record: StorageRecord | None = None


class NotTraced(Exception):
    """A job's compiled functions can't be rehearsed; the message says why, and the job can be rehearsed without compile."""


def is_modelled(options: Compile) -> bool:
    """Whether compiled functions of a job with these options are rehearsed as such: only Inductor's rules are known."""
    return options.enable and options.backend == _MODELLED


def rehearsed_options(options: Compile) -> Compile:
    """Return the options of a rehearsal: compile is off unless `is_modelled`, and never includes the optimizer's step.

    A compiled step of an optimizer refuses parameters on a CPU.
    """
    components = tuple(each for each in options.components if each != "optimizer")
    if not is_modelled(options) or not components:
        return options.replace(enable=False)
    register_backend(BACKEND, _compile)
    # The shapes of a rehearsal do not change.
    return options.replace(backend=BACKEND, components=components, mode=None, options=None, dynamic=False)


@contextmanager
def rehearse_compiled(record: StorageRecord) -> Iterator[None]:
    """In the body, let functions that are compiled with `rehearsed_options` note their memory and kernels in `record`.

    Raises:
        NotTraced: the compiler has failed.
    """
    global _record
    _record, before = record, _record
    # Compiled code has the sizes and the process groups of an earlier rehearsal.
    torch.compiler.reset()
    try:
        with (
            functorch_config().patch(enable_autograd_cache=False),
            inductor_config().patch(fx_graph_cache=False),
        ):
            yield
    except dynamo_errors().TorchDynamoException as error:
        cause = getattr(error, "inner_exception", error)
        raise cause if isinstance(cause, NotTraced) else _not_traced(cause) from error
    finally:
        _record = before
        torch.compiler.reset()


def _not_traced(error: BaseException) -> NotTraced:
    lines = str(error).strip().splitlines() or [""]
    return NotTraced(f"{type(error).__name__}: {lines[0]}")


@contextmanager
def _as_not_traced() -> Iterator[None]:
    """Raise NotTraced for errors of torch in the body, except for those that an eager rehearsal has, too."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
        raise _not_traced(error) from error


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    return inductor_stages().compile_fx(module, inputs, inner_compile=_finish)


def _finish(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Take the place of Inductor's last stage."""
    assert _record is not None
    stages = inductor_stages()
    # The backward is compiled while the step runs, and the compiler's own tensors are not to be recorded.
    with _record.paused(), torch.no_grad():
        # Autograd calls the compiler of the backward, and passes on its errors as they are.
        with _as_not_traced():
            stages.view_to_reshape(module)  # as Inductor does before its passes
            fake = stages.fake_tensor_prop(module, list(inputs))
            with stages.V.set_fake_mode(fake):
                stages.post_grad_passes(module, is_inference=options.get("is_inference", False))
                stages.fake_tensor_prop(module, list(inputs))  # for what the passes have inserted
        graph = CompiledGraph(module)
    return boxed(graph)


@dataclass(eq=False)
class _Kernel:
    """Fused operators that a GPU computes in one launch."""

    level: int
    reads: set[torch.fx.Node] = field(default_factory=set)
    """Tensors in memory, or views of them."""
    stores: list[torch.fx.Node] = field(default_factory=list)
    sizes: set[int] = field(default_factory=set)
    """The numbers of elements that it iterates over; with a reduction also the number of its results."""


class CompiledGraph:
    """A graph of Inductor that runs on fake tensors.

    It has three kinds of operators: external ones (products, attention, collectives, kernels of other libraries), views, and
    fused ones. The result of a fused operator is a buffer if an external operator or the graph's output reads it, if it is a
    reduction, or if it is used several times and costs too much to compute again. Any other result is a part of the
    expressions that use it.

    Kernels are sets of buffers that Inductor's scheduler fuses: they read the same tensors or each other, iterate over the
    same elements, and no external operator is between them. A buffer that only its own kernel uses takes no memory.

    Args:
        module: the graph after Inductor's passes, with the fake tensors of its nodes.
    """

    def __init__(self, module: torch.fx.GraphModule):
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        lowered = lowered_operators()
        fusible = {node.target for node in self.nodes if node.target in lowered and _is_fusible(node.target)}
        self.root: dict[torch.fx.Node, torch.fx.Node] = {}
        """By node, the node whose memory holds its result: for a view the viewed tensor's, for any other node itself."""
        self.members: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
        """By root, the root and its views."""
        for node in self.nodes:
            aliased = _aliased(node)
            if node.target is operator.getitem and (aliased := node.all_input_nodes[0]) is self.root[aliased]:
                # Each output of an external operator has memory of its own.
                aliased = aliased if aliased.target in fusible else None
            self.root[node] = node if aliased is None else self.root[aliased]
            self.members[self.root[node]].append(node)
        self.fused = {node for node in self.nodes if node.target in fusible and not self._is_view(node)}
        self.reads: dict[torch.fx.Node, set[torch.fx.Node]] = {}
        """By fused operator, the buffers, or views of them, that its expression reads."""
        self.buffers = self._find_buffers()
        self.kernels = self._find_kernels()
        self.in_memory = self._find_memory()
        self.launches = {max(k.stores, key=self.position.__getitem__): self._work(k) for k in self.kernels}
        self.freed = self._find_frees()

    def _is_view(self, node: torch.fx.Node) -> bool:
        return self.root[node] is not node and not _writes(node)

    def _is_external(self, node: torch.fx.Node) -> bool:
        if node.op != "call_function" or node.target is operator.getitem:
            return False
        return node not in self.fused and not self._is_view(node)

    def _find_buffers(self) -> set[torch.fx.Node]:
        """Return the fused operators whose results are buffers, or that write into a tensor, and fill `reads`.

        The rules are those of `GraphLowering.run_node` and `StorageBox` in torch._inductor.
        """
        limits, buffers = realization_limits(), set[torch.fx.Node]()
        operators: dict[torch.fx.Node, int] = {}
        written = {self.root[node] for node in self.nodes if _writes(node)}
        for node in self.nodes:
            if node not in self.fused:
                continue
            reads, count = set[torch.fx.Node](), 1
            for source in node.all_input_nodes:
                root = self.root[source]
                if _writes(node) and source is node.args[0]:
                    continue
                if root in self.fused and root not in buffers:
                    reads |= self.reads[root]
                    count += operators[root]
                else:
                    reads.add(source)
            self.reads[node], operators[node] = reads, count
            users = [
                user for member in self.members[node] for user in member.users if not self._is_view(user)
            ]
            if (
                node in written
                or _writes(node)
                or _is_reduction(node)
                or any(user not in self.fused for user in users)
                or (len(node.users) > 1 and (len(reads) > limits.reads or count > limits.operators))
                or len(reads) > limits.accumulated_reads
            ):
                buffers.add(node)
        return buffers

    def _find_kernels(self) -> list[_Kernel]:
        """Return the kernels that compute the buffers."""
        level: dict[torch.fx.Node, int] = {}
        kernels: list[_Kernel] = []
        for node in self.nodes:
            # Operators of the same level have no external operator between them.
            level[node] = max(
                (level[source] + self._is_external(source) for source in node.all_input_nodes), default=0
            )
            if node not in self.buffers:
                continue
            kernel = _Kernel(level[node], set(self.reads[node]), [node], _sizes(node))
            roots = {self.root[source] for source in kernel.reads}
            for other in list(kernels):
                others = {self.root[source] for source in other.reads} | set(other.stores)
                if (
                    other.level == kernel.level
                    and roots & others
                    and kernel.sizes & other.sizes
                    and not any(map(_is_outer_reduction, (node, *other.stores)))
                ):
                    kernels.remove(other)
                    kernel.reads |= other.reads
                    kernel.stores += other.stores
                    kernel.sizes |= other.sizes
            kernels.append(kernel)
        return kernels

    def _find_memory(self) -> set[torch.fx.Node]:
        """Return the buffers that take memory: those that are used outside of their kernel."""
        used = {
            self.root[source]
            for kernel in self.kernels
            for source in kernel.reads
            if self.root[source] not in kernel.stores
        }
        for node in self.nodes:
            if node.op == "output" or self._is_external(node):
                used.update(self.root[source] for source in node.all_input_nodes)
        return {node for node in self.buffers if node in used and not _writes(node)}

    def _work(self, kernel: _Kernel) -> Work:
        largest, read_bytes = max(kernel.sizes), dict[torch.fx.Node, int]()
        for source in kernel.reads:
            root = self.root[source]
            if root not in kernel.stores:
                # A lookup reads as many elements as it returns.
                size = min(source.meta["val"].numel(), largest) * source.meta["val"].element_size()
                read_bytes[root] = min(read_bytes.get(root, 0) + size, _bytes(root))
        stored_bytes = sum(_bytes(node) for node in kernel.stores if node in self.in_memory or _writes(node))
        return Work(FUSED, 0, sum(read_bytes.values()) + stored_bytes, None)

    def _find_frees(self) -> dict[torch.fx.Node, list[torch.fx.Node]]:
        """Return for each node the nodes whose tensors are dropped after it has run."""
        last: dict[torch.fx.Node, torch.fx.Node] = {}
        for node in self.nodes:
            # What an expression reads is read when its buffer is computed, and has to live until then.
            for source in (*node.all_input_nodes, *(self.reads[node] if node in self.buffers else ())):
                last[self.root[source]] = node
            last.setdefault(self.root[node], node)
        freed: dict[torch.fx.Node, list[torch.fx.Node]] = defaultdict(list)
        for root, node in last.items():
            freed[node] += self.members[root]
        return dict(freed)

    def __call__(self, args: list[Any]) -> Any:
        """Return the graph's outputs for its inputs, which are taken out of the list, so that they are freed when used."""
        assert _record is not None
        values: dict[torch.fx.Node, Any] = {}
        inputs = args[::-1]
        args.clear()
        for node in self.nodes:
            if node.op == "placeholder":
                values[node] = inputs.pop()
            elif node.op == "get_attr":
                values[node] = getattr(self.module, str(node.target))
            elif node.op == "output":
                return torch.fx.node.map_arg(node.args[0], values.__getitem__)
            else:
                with _as_not_traced():
                    self._compute(node, values, _record)
            if node in self.launches:
                _record.operate(self.launches[node])
            for dropped in self.freed.get(node, ()):
                values.pop(dropped, None)
        raise AssertionError("a graph has an output")

    def _compute(self, node: torch.fx.Node, values: dict[torch.fx.Node, Any], record: StorageRecord) -> None:
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        target = cast(Callable[..., Any], node.target)
        if self._is_external(node):
            values[node] = target(*args, **kwargs)
            return
        with record.paused():
            result = values[node] = target(*args, **kwargs)
        del args, kwargs
        if node in self.in_memory:
            # A kernel writes into one of its inputs, if nothing else uses it.
            for root in self.freed.get(node, ()):
                if root in self.members and root.op != "placeholder" and _bytes(root) == _bytes(node):
                    for dropped in self.members[root]:
                        values.pop(dropped, None)
                    break
            outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            for index, output in enumerate(outputs):
                record.allocate(output, f"{FUSED}: {node.name}", index, len(outputs))


def _is_fusible(target: Any) -> bool:
    """Whether Inductor never calls a library's kernel for an operator that it lowers."""
    if not isinstance(target, OpOverload):
        return False
    namespace, _, name = schema(target).name.partition("::")
    if namespace not in ("aten", "prims") or name in _LIBRARY or "mm" in name:
        return False
    return target.overloadpacket not in flop_registry


def _aliased(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the input whose memory holds the result of `node`; None: the result has memory of its own."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    declared = schema(node.target)
    if declared.name.endswith("::wait_tensor"):
        return node.all_input_nodes[0]
    for value, argument in zip(node.args, declared.arguments, strict=False):
        if (
            argument.alias_info is not None
            and declared.returns
            and declared.returns[0].alias_info is not None
        ):
            return value if isinstance(value, torch.fx.Node) else None
    return None


def _writes(node: torch.fx.Node) -> bool:
    """Whether an operator writes into its first input."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    arguments = schema(node.target).arguments
    return bool(arguments) and arguments[0].alias_info is not None and arguments[0].alias_info.is_write


def _is_reduction(node: torch.fx.Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())


def _is_outer_reduction(node: torch.fx.Node) -> bool:
    """Whether an operator is a reduction that keeps the last dimension."""
    if not _is_reduction(node):
        return False
    source = node.all_input_nodes[0].meta["val"]
    dims = node.args[1] if len(node.args) > 1 else None
    if dims is None or dims == []:
        return False
    dims = [dim % source.dim() for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    return source.dim() - 1 not in dims


def _sizes(node: torch.fx.Node) -> set[int]:
    sizes = {_elements(node)}
    if _is_reduction(node):
        sizes.add(max(_elements(source) for source in node.all_input_nodes))
    return sizes


def _tensors(node: torch.fx.Node) -> list[torch.Tensor]:
    return [x for x in tree_leaves(node.meta["val"]) if isinstance(x, torch.Tensor)]


def _elements(node: torch.fx.Node) -> int:
    return sum(x.numel() for x in _tensors(node))


def _bytes(node: torch.fx.Node) -> int:
    return sum(x.numel() * x.element_size() for x in _tensors(node))
