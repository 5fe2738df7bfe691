"""What async tensor parallelism would fuse: the graphs of a split model's blocks as inductor would finish them, on no GPU.

The ranks do not exist (`titanplans.proof.ranks.fake.fake_ranks`), the model is on the CPU. Each block is compiled by
dynamo, AOTAutograd and inductor as in training, partitioner, decompositions and passes included, up to the point
where inductor would write kernels: its pass that fuses runs on the graph. In place of kernels the graph as it was
before its passes runs on the CPU, so that the backward is captured too, and code between graphs gets values.
The pass asks for NCCL and for symmetric memory; for its duration it is told that both are there.
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
    """What became of one collective of a block: a gather, a scatter, or a reduction of more than one number."""

    operation: str
    backward: bool

    module: str
    """The module within the block that issues it; "" if dynamo noted none."""

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


class Graph(NamedTuple):
    """One graph of a block."""

    number: int
    """Forward and backward of the same code share it; in the order of the forward."""
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
    """Compile `blocks` of `model`, each by itself, and return their graphs: forward, then backward, as they are issued.

    Without the gather of the gradient where the sharded stream begins: no product reads it.

    Args:
        model: split by its plan over ranks that do not exist, on the CPU, prepared by `async_tp.prepare`.
        blocks: fully qualified names.
        run: runs forward and backward.
        group: name of the TP group.
        prepare: prepares a block for its compilation, and returns whether it is to be one graph.
        install: adds hooks to inductor's; they are gone afterwards.
    """
    backends = {}
    with _as_under_async_tp(group):
        install()
        for name in blocks:
            block = model.get_submodule(name)
            modules = {str(id(module)): path for path, module in block.named_modules()}
            # Blocks with different backends are compiled apart, also where their code is the same.
            backends[name] = _Capture(modules)
            block.compile(backend=backends[name], fullgraph=prepare(block))
        run()
    return {name: _in_order(backend.graphs) for name, backend in backends.items()}


def graph_breaks() -> dict[str, int]:
    """Return where dynamo has ended graphs since the last `capture` began, and how often."""
    found: dict[str, int] = {}
    for reason, number in compiler_counters()["graph_break"].items():
        function = re.search(r"<function ([\w.<>]+) at ", reason)
        words = function[1] if function else reason.splitlines()[0]
        found[words] = found.get(words, 0) + number
    return found


def _in_order(graphs: Sequence[Graph]) -> list[Graph]:
    # The stream begins in a hook, whose graph communicates in its backward alone.
    silent = {g.number for g in graphs if not g.backward and not g.verdicts}
    begins = silent & {g.number for g in graphs if g.verdicts}
    held = [g for g in graphs if g.number not in begins]
    return sorted(held, key=lambda g: (g.backward, -g.number if g.backward else g.number))


class _Capture:
    """A backend: inductor up to its passes."""

    def __init__(self, modules: Mapping[str, str]):
        self.modules = modules
        """By `str(id(module))`, as dynamo notes them, each module's name within the block."""
        self.graphs: list[Graph] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return inductor_stages().compile_fx(graph, inputs, inner_compile=self._finish)  # type: ignore[arg-type]

    def _finish(self, module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        stages = inductor_stages()
        stages.view_to_reshape(module)  # as inductor does
        with torch.no_grad():
            fake = stages.fake_tensor_prop(module, list(inputs))
        made = stages.make_boxed_func(partial(_run_alone, copy.deepcopy(module)))
        # But for the scales of float8, which are reduced by minimum.
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
        found = tuple(self._verdict(node, adjacent[node], backward) for node in collectives)
        self.graphs.append(Graph(options.get("graph_id") or 0, backward, found))
        return made

    def _verdict(self, node: torch.fx.Node, adjacent: Sequence[torch.fx.Node], backward: bool) -> Verdict:
        issued = str(operation(node))
        products = self._of(p for p in adjacent if is_erased(p))
        if is_erased(node):
            left = self._of(p for p in adjacent if not is_erased(p))
            rest = f"not with {', '.join(left)}" if left else ""
            return Verdict(issued, backward, self._module(node), True, products, (), rest, True)
        obstacle, possible = "fused, but also issued separately for the backward", True
        if not products:
            products, obstacle, possible = self._obstacle(node)
        meanwhile = self._of(overlapped(node))
        return Verdict(issued, backward, self._module(node), False, products, meanwhile, obstacle, possible)

    def _obstacle(self, node: torch.fx.Node) -> tuple[tuple[str, ...], str, bool]:
        """Return the products next to a collective, why it is not fused, and whether that could be otherwise."""
        issued = str(operation(node))
        if issued not in ("all_gather", "reduce_scatter"):
            return (), f"{issued.replace('_', '-')}, which is never fused", False
        if issued == "reduce_scatter" and len(terms := summed_products(edge(node))) > 1:
            products = self._of(terms)
            return products, f"a sum of {len(terms)} products ({', '.join(products)})", False
        if not (found := neighbours(node)):
            return (), "a graph break parts it from its product", True
        nearest = [chain.product for chain in found if len(chain.steps) == len(found[0].steps)]
        steps = [name if "norm" in (name := self._module(n)).lower() else name_of(n) for n in found[0].steps]
        if (kind := name_of(found[0].product)) != "mm":
            steps.append(kind)
        products, between = self._of(nearest), ", ".join(dict.fromkeys(steps)) or "nothing"
        return products, f"{between} between it and {', '.join(products) or 'its product'}", True

    def _module(self, node: torch.fx.Node) -> str:
        """Return the innermost module's name within the block; "" for the block's own, or if it is not known."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        keys = (str(key).partition("@")[0] for key in reversed(stack))
        return next((self.modules[key] for key in keys if key in self.modules), "")

    def _of(self, nodes: Iterable[torch.fx.Node]) -> tuple[str, ...]:
        """Return the modules of products, each once, in the block's order."""
        those = {self._module(node) for node in nodes if is_long(node)} - {""}
        return tuple(name for name in self.modules.values() if name in those)


def _run_alone(module: torch.fx.GraphModule, *inputs: Any) -> Any:
    with _Alone():
        return module(*inputs)


class _Alone(TorchDispatchMode):
    """Collectives without other ranks: each holds this rank's values, and adds zero."""

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
    """Compile as with async TP switched on for `group`, from a clean slate, and leave no trace."""
    nccl = dist.is_nccl_available
    with ExitStack() as stack:
        # `prepare` may set the one for good; blocks are compiled apart, so often.
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
        log.setLevel(logging.ERROR)  # a warning for each graph without collectives
        stack.callback(torch.compiler.reset)
        stack.callback(setattr, dist, "is_nccl_available", nccl)
        dist.is_nccl_available = lambda: True
        yield
