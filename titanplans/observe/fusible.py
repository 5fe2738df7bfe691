"""Find without a GPU which collectives async tensor parallelism would fuse with matrix products. Start at `capture`.

The ranks are fake (`titanplans.proof.ranks.fake.fake_ranks`), and the model is on the CPU. Each block goes through Dynamo,
AOTAutograd and all passes of Inductor as in training, including the pass that fuses, but Inductor generates no kernels.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.fx
from torch import nn

from titanplans.observe.chains import (
    PRODUCTS,
    VIEWS,
    edge,
    is_long,
    name_of,
    neighbours,
    operation,
    overlapped,
    summed_products,
)
from titanplans.observe.graphs import is_backward
from titanplans.observe.operators import operation_of
from titanplans.torch_private.compile import (
    ASYNC_TP_SETTING,
    FIRST_PASSES,
    LAST_PASSES,
    compiler_counters,
    dynamo_config,
    functorch_config,
    inductor_config,
    inductor_stages,
    is_erased,
)
from titanplans.torch_private.dispatch import TorchDispatchMode
from titanplans.torch_private.distributed import pretend_symmetric_memory


@dataclass(frozen=True)
class Verdict:
    """Whether and how one collective of a block is fused. All-reduces by minimum, of float8 scales, have no verdict."""

    operation: str
    backward: bool

    module: str
    """The module within the block that issues the collective; "" for the block itself, or if Dynamo recorded no module."""

    fused: bool

    products: tuple[str, ...]
    """Modules whose products the collective is fused with; if it is not fused, modules whose products are next to it in the
    graph."""

    overlapped: tuple[str, ...]
    """Modules whose products run between the collective and its wait, if the collective is not fused."""

    obstacle: str
    """Why the collective is not fused, or which adjacent products are not fused with it; "" if all are."""

    possible: bool
    """Whether the collective is fused, or could be in another graph. False: torch's pass does not support it."""

    @property
    def hidden(self) -> bool:
        """Whether matrix products hide the collective: it is fused with them, or overlaps them."""
        return self.fused or bool(self.overlapped)


class Graph(NamedTuple):
    """One graph of a block."""

    number: int
    """Inductor's id of the graph, in the order of the forward. The forward and the backward of the same code share it."""
    backward: bool
    verdicts: tuple[Verdict, ...]


def capture(
    model: nn.Module,
    blocks: Iterable[str],
    run: Callable[[], object],
    group: str,
    prepare: Callable[[nn.Module], bool] = lambda block: True,
    install: Callable[[], None] = lambda: None,
) -> dict[str, list[Graph]]:
    """Compile each of `blocks` separately, and return its forward and then its backward graphs, in the order of execution.

    The gather of the gradient at the beginning of the sharded stream is left out, since no product uses it.

    Args:
        model: split by its plan over fake ranks, on the CPU, prepared by `async_tp.prepare`.
        blocks: fully qualified names.
        run: runs a forward and a backward of the model.
        group: name of the TP group.
        prepare: prepares a block for compilation, and returns whether it must be one graph.
        install: adds passes to Inductor, which are removed afterwards.
    """
    backends = {}
    with _as_under_async_tp(group):
        install()
        for name in blocks:
            block = model.get_submodule(name)
            modules = {str(id(module)): path for path, module in block.named_modules()}
            # Dynamo does not share compiled code between different backends, so each block gets graphs of its own.
            backends[name] = _Capture(modules)
            block.compile(backend=backends[name], fullgraph=prepare(block))
        run()
    return {name: _in_order(backend.graphs) for name, backend in backends.items()}


def graph_breaks() -> dict[str, int]:
    """Return the number of graph breaks since the last `capture` began, by function, or else by Dynamo's reason."""
    breaks: dict[str, int] = {}
    for reason, count in compiler_counters()["graph_break"].items():
        function = re.search(r"<function ([\w.<>]+) at ", reason)
        cause = function[1] if function else reason.splitlines()[0]
        breaks[cause] = breaks.get(cause, 0) + count
    return breaks


def _in_order(graphs: Sequence[Graph]) -> list[Graph]:
    # Leave out the graph of the hook that begins the stream: it is the only graph that communicates only in the backward.
    forwards_without = {g.number for g in graphs if not g.backward and not g.verdicts}
    stream_begins = forwards_without & {g.number for g in graphs if g.verdicts}
    others = [g for g in graphs if g.number not in stream_begins]
    return sorted(others, key=lambda g: (g.backward, -g.number if g.backward else g.number))


class _Capture:
    """A backend of torch.compile: Inductor, including its passes, without code generation."""

    def __init__(self, modules: Mapping[str, str]):
        self.modules = modules
        """The name of each module within the block, by `str(id(module))`, which Dynamo records in `nn_module_stack`."""
        self.graphs: list[Graph] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return inductor_stages().compile_fx(graph, inputs, inner_compile=self._finish)  # type: ignore[arg-type]

    def _finish(self, module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        stages = inductor_stages()
        stages.view_to_reshape(module)  # as Inductor does before its passes
        with torch.no_grad():
            fake = stages.fake_tensor_prop(module, list(inputs))
        # Run a copy of the graph from before the passes: the backward is then captured, too, and code between graphs gets
        # values.
        runnable = stages.make_boxed_func(partial(_run_on_one_rank, copy.deepcopy(module)))
        # Leave out the scales of float8, which are reduced by minimum.
        collectives = [n for n in module.graph.nodes if operation(n) is not None and n.args[1:2] != ("min",)]
        adjacent = {
            node: [
                chain.product
                for chain in neighbours(node)
                if name_of(chain.product) in PRODUCTS and all(name_of(step) in VIEWS for step in chain.steps)
            ]
            for node in collectives
        }
        with stages.V.set_fake_mode(fake):
            stages.post_grad_passes(module, is_inference=options.get("is_inference", False))
        backward = is_backward(module.graph)
        verdicts = tuple(self._verdict(node, adjacent[node], backward) for node in collectives)
        self.graphs.append(Graph(options.get("graph_id") or 0, backward, verdicts))
        return runnable

    def _verdict(self, node: torch.fx.Node, adjacent: Sequence[torch.fx.Node], backward: bool) -> Verdict:
        issued = str(operation(node))
        products = self._of(p for p in adjacent if is_erased(p))
        if is_erased(node):
            unfused = self._of(p for p in adjacent if not is_erased(p))
            obstacle = f"not with {', '.join(unfused)}" if unfused else ""
            return Verdict(issued, backward, self._module(node), True, products, (), obstacle, True)
        obstacle, possible = "fused, but also issued separately for the backward", True
        if not products:
            products, obstacle, possible = self._obstacle(node)
        hiding = self._of(overlapped(node))
        return Verdict(issued, backward, self._module(node), False, products, hiding, obstacle, possible)

    def _obstacle(self, node: torch.fx.Node) -> tuple[tuple[str, ...], str, bool]:
        """Return the products next to a collective, why it is not fused, and whether it could be fused in another
        graph."""
        issued = str(operation(node))
        if issued not in ("all_gather", "reduce_scatter"):
            return (), f"{issued.replace('_', '-')}, which is never fused", False
        if issued == "reduce_scatter" and len(terms := summed_products(edge(node))) > 1:
            products = self._of(terms)
            return products, f"a sum of {len(terms)} products ({', '.join(products)})", False
        if not (chains := neighbours(node)):
            return (), "a graph break separates it from its product", True
        nearest = [chain.product for chain in chains if len(chain.steps) == len(chains[0].steps)]
        steps = [name if "norm" in (name := self._module(n)).lower() else name_of(n) for n in chains[0].steps]
        if (kind := name_of(chains[0].product)) != "mm":
            steps.append(kind)
        products, between = self._of(nearest), ", ".join(dict.fromkeys(steps)) or "nothing"
        return products, f"{between} between it and {', '.join(products) or 'its product'}", True

    def _module(self, node: torch.fx.Node) -> str:
        """Return the name of a node's innermost module within the block; "" for the block, or if it is not recorded."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        keys = (str(key).partition("@")[0] for key in reversed(stack))
        return next((self.modules[key] for key in keys if key in self.modules), "")

    def _of(self, nodes: Iterable[torch.fx.Node]) -> tuple[str, ...]:
        """Return the names of the modules of products, each once, in the order of the block."""
        names = {self._module(node) for node in nodes if is_long(node)} - {""}
        return tuple(name for name in self.modules.values() if name in names)


def _run_on_one_rank(module: torch.fx.GraphModule, *inputs: Any) -> Any:
    with _OneRank():
        return module(*inputs)


class _OneRank(TorchDispatchMode):
    """Runs collectives without other ranks: in a gather the other ranks count as equal to this rank, and in a sum as 0."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        issued = operation_of(func)
        if issued == "all_gather":
            tensor, ranks, _ = args
            return torch.cat([tensor] * ranks)
        if issued == "reduce_scatter":
            tensor, _, ranks, _ = args
            return tensor.chunk(ranks)[0].clone()
        if issued == "all_to_all":
            return args[0].clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def _as_under_async_tp(group: str) -> Iterator[None]:
    """In the body, compile with async TP for `group` and without caches. Restore all settings afterwards."""
    nccl = dist.is_nccl_available
    with ExitStack() as stack:
        # `nested_graph_breaks` is patched with its current value so that it is restored, because `prepare` may set it. The
        # limit is raised because the code that blocks share is compiled again for each block.
        stack.enter_context(
            dynamo_config().patch(
                nested_graph_breaks=dynamo_config().nested_graph_breaks, recompile_limit=1000
            )
        )
        stack.enter_context(functorch_config().patch(enable_autograd_cache=False))
        config = inductor_config()
        hooks = {name: getattr(config, name) for name in (FIRST_PASSES, LAST_PASSES)}
        stack.enter_context(config.patch({ASYNC_TP_SETTING: True, "fx_graph_cache": False, **hooks}))
        stack.enter_context(pretend_symmetric_memory(group))
        torch.compiler.reset()
        compiler_counters()["graph_break"].clear()
        log = logging.getLogger("torch._inductor.fx_passes.micro_pipeline_tp")
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)  # the pass warns about each graph without collectives
        stack.callback(torch.compiler.reset)
        # The pass fuses only if NCCL and symmetric memory are available.
        stack.callback(setattr, dist, "is_nccl_available", nccl)
        dist.is_nccl_available = lambda: True
        yield
