"""The graphs of a split model's blocks as inductor would finish them under async tensor parallelism, without a GPU.

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
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import nn

from titanplans.observe.async_tp.chains import adjacent, operation, overlapped
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
class Captured:
    """One graph of a block, after inductor's passes."""

    number: int
    """Forward and backward of the same code share it; in the order of the forward."""

    backward: bool
    collectives: tuple[torch.fx.Node, ...]
    """Gathers, scatters and reductions of more than one number, before the pass; those that it fused are erased."""

    adjacent: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]
    """The products that stood next to each gather and scatter before the pass, with nothing but a view between."""

    overlapped: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]
    """The products that stand between each collective and its wait, after all passes."""


def capture(
    model: nn.Module,
    blocks: Iterable[str],
    run: Callable[[], object],
    group: str,
    prepare: Callable[[nn.Module], bool] = lambda block: True,
    install: Callable[[], None] = lambda: None,
) -> dict[str, list[Captured]]:
    """Compile `blocks` of `model`, each by itself, and return their graphs in the order of capture.

    Args:
        model: split by its plan over ranks that do not exist, on the CPU, prepared by `async_tp.prepare`.
        blocks: fully qualified names.
        run: runs forward and backward.
        group: name of the TP group.
        prepare: prepares a block for its compilation, and returns whether it is to be one graph.
        install: adds hooks to inductor's; they are gone afterwards.
    """
    captured: dict[str, list[Captured]] = {name: [] for name in blocks}
    with _as_under_async_tp(group):
        install()
        for name in blocks:
            block = model.get_submodule(name)
            # Blocks with different backends are compiled apart, also where their code is the same.
            block.compile(backend=_Capture(captured[name]), fullgraph=prepare(block))
        run()
    return captured


def graph_breaks() -> dict[str, int]:
    """Return where dynamo has ended graphs since the last `capture` began, and how often."""
    found: dict[str, int] = {}
    for reason, number in compiler_counters()["graph_break"].items():
        function = re.search(r"<function ([\w.<>]+) at ", reason)
        words = function[1] if function else reason.splitlines()[0]
        found[words] = found.get(words, 0) + number
    return found


class _Capture:
    """A backend: inductor up to its passes."""

    def __init__(self, captured: list[Captured]):
        self.captured = captured

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return inductor_stages().compile_fx(graph, inputs, inner_compile=self._finish)  # type: ignore[arg-type]

    def _finish(self, module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        stages = inductor_stages()
        stages.view_to_reshape(module)  # as inductor does
        with torch.no_grad():
            fake = stages.fake_tensor_prop(module, list(inputs))
        made = stages.make_boxed_func(partial(_run_alone, copy.deepcopy(module)))
        # But for the scales of float8, which are reduced by minimum.
        collectives = tuple(
            node for node in module.graph.nodes if operation(node) is not None and node.args[1:2] != ("min",)
        )
        products = {node: adjacent(node) for node in collectives}
        with stages.V.set_fake_mode(fake):
            stages.post_grad_passes(module, is_inference=options.get("is_inference", False))
        number = options.get("graph_id") or 0
        backward = is_backward(module.graph)
        meanwhile = {node: overlapped(node) for node in collectives if not is_erased(node)}
        self.captured.append(Captured(number, backward, collectives, products, meanwhile))
        return made


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
