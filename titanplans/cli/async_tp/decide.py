"""What async tensor parallelism would fuse: the model, split over ranks that do not exist, its graphs, the verdicts."""

import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from titanplans import modeling
from titanplans.apply.apply import apply_plan
from titanplans.cli.async_tp.gpu_breaks import graphs_end_as_on_a_gpu
from titanplans.cli.verify.prepare import Prepared, prepare
from titanplans.cli.verify.repeated_blocks import kind
from titanplans.cli.verify.subject import Subject
from titanplans.errors import VerifyError
from titanplans.observe.async_tp.capture import Captured, capture, graph_breaks
from titanplans.observe.async_tp.verdict import BEGINS, Verdict, verdicts
from titanplans.parallel.compile import async_tp
from titanplans.parallel.compile.fla_graphs import calls_kernels, end_graphs_at_kernels
from titanplans.plan.decoder import Decoder, find_decoder
from titanplans.precision.float8.conversion import keep_plain_between_graphs
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.torch_private.compile import dynamo_errors

_TOKENS = 128
"""In a sequence: more than the 64 up to which FLA's mixers take another kernel."""


class Count(NamedTuple):
    """Collectives by what became of them."""

    fused: int
    overlapped: int
    total: int

    @property
    def hidden(self) -> int:
        """How many are fused or overlapped."""
        return self.fused + self.overlapped


@dataclass(frozen=True)
class Blocks:
    """Blocks whose collectives have the same verdicts."""

    title: str
    names: tuple[str, ...]
    """Their names; none for the gather where the stream begins, which stands apart."""

    graphs: int
    """Graphs that each becomes, forward."""

    collectives: tuple[Verdict, ...]

    def count(self, *, backward: bool) -> Count:
        """Return how many collectives are fused and overlapped, of how many."""
        those = [v for v in self.collectives if v.backward == backward]
        return Count(sum(v.fused for v in those), sum(v.hidden and not v.fused for v in those), len(those))


@dataclass(frozen=True)
class Decision:
    """What would be fused at one degree."""

    subject: str
    degree: int
    batch_size: int
    seq_len: int
    notes: tuple[str, ...]
    blocks: tuple[Blocks, ...]
    graph_breaks: Mapping[str, int]
    """Where graphs end, and how often, over the captured blocks."""

    seconds: float

    def count(self, *, backward: bool) -> Count:
        """Return how many collectives are fused and overlapped, of how many, in one block of each kind together."""
        counts = [blocks.count(backward=backward) for blocks in self.blocks]
        fused, overlapped, total = (sum(numbers) for numbers in zip(*counts, strict=True))
        return Count(fused, overlapped, total)

    @property
    def complete(self) -> bool:
        """Whether everything is fused or overlapped, but for what no other graph could hide."""
        return all(v.hidden or not v.possible for b in self.blocks for v in b.collectives)


def decide(subject: Subject, request: Namespace, degree: int, progress: Callable[[str], None]) -> Decision:
    """Decide what async tensor parallelism would fuse in `subject` at one degree.

    Raises:
        UserError: it can't be asked as written; the plan does not fit the model or the degree.
    """
    start = time.perf_counter()
    if subject.sequence_parallel is False:
        raise VerifyError(
            f"async-tp {request.subject}: without sequence parallelism there are all-reduces only, which torch's pass does "
            "not fuse; switch it on"
        )
    progress("the model")
    prepared = _prepare(subject, request, degree)
    model = prepared.model
    decoder = find_decoder(model, required=False)
    if not decoder.blocks:
        raise VerifyError(
            f"async-tp {request.subject}: {type(model).__name__} has no list of blocks to compile"
        )
    alike = _alike(decoder)
    inputs = prepared.inputs(prepared.batch_size, prepared.seq_len, 0)
    with fake_ranks(degree) as mesh:
        apply_plan(model, mesh, plan=subject.plan, loss_parallel=False)
        _give_values(model)
        async_tp.prepare(model)
        progress("the graphs")
        try:
            with graphs_end_as_on_a_gpu():
                captured = capture(
                    model,
                    alike,
                    partial(_step, model, inputs),
                    mesh.get_group().group_name,
                    _prepare_block,
                    async_tp.install_passes,
                )
        except (dynamo_errors().TorchDynamoException, AssertionError) as error:  # dynamo's own assertions
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise VerifyError(
                f"async-tp {request.subject}: the blocks can't be compiled as in training: {reason}; leave out what is "
                "special, such as float8, or see TORCH_LOGS=+dynamo"
            ) from error
    return Decision(
        subject.words,
        degree,
        prepared.batch_size,
        prepared.seq_len,
        prepared.notes,
        _judged(model, decoder, alike, captured),
        graph_breaks(),
        time.perf_counter() - start,
    )


def _judged(
    model: nn.Module,
    decoder: Decoder,
    alike: Mapping[str, tuple[str, ...]],
    captured: Mapping[str, Sequence[Captured]],
) -> tuple[Blocks, ...]:
    """Return the verdicts on each kind of block, and apart from them that on the gather where the stream begins."""
    kinds = {block.name: block.kind for block in decoder.blocks}
    found: dict[tuple[str, tuple[Verdict, ...]], Blocks] = {}
    for name, names in alike.items():
        modules = {str(id(module)): path for path, module in model.get_submodule(name).named_modules()}
        own = verdicts(captured[name], modules)
        begins = tuple(v for v in own if v.obstacle == BEGINS)
        rest = tuple(v for v in own if v.obstacle != BEGINS)
        graphs = sum(not graph.backward for graph in captured[name]) - bool(begins)
        for title, verdict, held in (
            (kinds[name], rest, names),
            (f"{name}, where the sharded stream begins", begins, ()),
        ):
            if verdict:
                before = found.get((title, verdict), Blocks(title, (), graphs, verdict))
                found[title, verdict] = replace(before, names=(*before.names, *held))
    return tuple(found.values())


def _prepare(subject: Subject, request: Namespace, degree: int) -> Prepared:
    """Prepare the model as for a proof, in float32, with enough tokens for what depends on their number."""
    unemulated = replace(subject, float8=subject.float8.replace(emulate=False))  # the products that a GPU has
    prepared = prepare(unemulated, request, torch.device("cpu"), torch.float32)
    keep_plain_between_graphs(prepared.model)
    if request.seq_len is not None:
        return prepared
    seq_len = -(max(_TOKENS, prepared.seq_len) // -degree) * degree
    notes = prepared.notes
    if subject.seq_len is not None and (rest := subject.seq_len % degree):
        seq_len += rest
        notes += (
            f"{rest} tokens left over of a multiple of {degree}, as the job's {subject.seq_len} leave (--seq-len)",
        )
    return replace(prepared, seq_len=seq_len, notes=notes)


def _alike(decoder: Decoder) -> dict[str, tuple[str, ...]]:
    """Return the first block of each kind, with all of its kind: the first of all, where the stream may begin, is one."""
    found: dict[Any, list[str]] = {}
    for block in decoder.blocks:
        found.setdefault(kind(block.module), []).append(block.name)
    return {names[0]: tuple(names) for names in found.values()}


def _prepare_block(block: nn.Module) -> bool:
    """Let the graphs of a block end at the kernels of flash-linear-attention; return whether it is one graph."""
    if several := calls_kernels(block):
        end_graphs_at_kernels(block)
    return not several


def _give_values(model: nn.Module) -> None:
    """Give this rank's shards of a model on meta memory and values: collectives of ranks that don't exist give any."""
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device="cpu")
        modeling.initialize(model, seed=0)  # pyrefly: ignore[bad-argument-type]  what lies on meta, `modeling.build` made


def _step(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    output = model(**inputs)
    if not isinstance(output, torch.Tensor):
        output = output.logits if hasattr(output, "logits") else output[0]
    output.float().sum().backward()
