"""The graphs of a split model's blocks as inductor would finish them under async tensor parallelism, without a GPU.

The ranks do not exist (`titanplans.proof.simulate.fake_ranks`), the model is on the CPU. Each block is compiled by
dynamo, AOTAutograd and inductor as in training, partitioner, decompositions and passes included, up to the point
where inductor would write kernels: its pass that fuses runs on the graph, and zeros are returned in place of
results, so that the backward is captured too. The pass asks for NCCL and for symmetric memory; for its duration it
is told that both are there.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.fx
from torch import nn

from titanplans.observe.async_tp.chains import adjacent, operation
from titanplans.observe.graphs import is_backward
from titanplans.torch_private import (
    ASYNC_TP_SETTING,
    compiler_counters,
    dynamo_config,
    functorch_config,
    inductor_config,
    inductor_stages,
    pretend_symmetric_memory,
)


@dataclass(frozen=True)
class Captured:
    """One graph of a block, after inductor's pass."""

    number: int
    """Forward and backward of the same code share it; in the order of the forward."""

    backward: bool
    collectives: tuple[torch.fx.Node, ...]
    """Gathers, scatters and reductions of more than one number, before the pass; those that it fused are erased."""

    adjacent: Mapping[torch.fx.Node, tuple[torch.fx.Node, ...]]
    """The products that stood next to each gather and scatter before the pass, with nothing but a view between."""


def capture(
    model: nn.Module,
    blocks: Iterable[str],
    run: Callable[[], object],
    group: str,
    prepare: Callable[[nn.Module], bool] = lambda block: True,
) -> dict[str, list[Captured]]:
    """Compile `blocks` of `model`, each by itself, and return their graphs in the order of capture.

    Args:
        model: split by its plan over ranks that do not exist, on the CPU, prepared by `async_tp.prepare`.
        blocks: fully qualified names.
        run: runs forward and backward.
        group: name of the TP group.
        prepare: prepares a block for its compilation, and returns whether it is to be one graph.
    """
    captured: dict[str, list[Captured]] = {name: [] for name in blocks}
    with _as_under_async_tp(group):
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
        made = stages.make_boxed_func(_Zeros(module.graph))
        # But for the scales of float8, which are reduced by minimum.
        collectives = tuple(
            node for node in module.graph.nodes if operation(node) is not None and node.args[1:2] != ("min",)
        )
        products = {node: adjacent(node) for node in collectives}
        with stages.V.set_fake_mode(fake):
            stages.post_grad_passes(module, is_inference=options.get("is_inference", False))
        number = options.get("graph_id") or 0
        backward = is_backward(module.graph)
        self.captured.append(Captured(number, backward, collectives, products))
        return made


class _Zeros:
    """In place of a compiled graph: outputs as `graph` has them, of zeros, and inputs that it returns."""

    def __init__(self, graph: torch.fx.Graph):
        placeholders = {node: place for place, node in enumerate(graph.find_nodes(op="placeholder"))}
        (output,) = graph.find_nodes(op="output")
        self.outputs = [
            placeholders[out] if out in placeholders else out and out.meta["val"] for out in output.args[0]
        ]

    def __call__(self, *inputs: Any) -> list[Any]:
        return [_made(output, inputs) for output in self.outputs]


def _made(output: Any, inputs: Sequence[Any]) -> Any:
    if isinstance(output, int):
        return inputs[output]
    if not isinstance(output, torch.Tensor):
        return output
    made = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device=output.device)
    return made.zero_()


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
        stack.enter_context(inductor_config().patch({ASYNC_TP_SETTING: True, "fx_graph_cache": False}))
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
