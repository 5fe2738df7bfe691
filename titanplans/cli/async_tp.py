"""`titanplans async-tp`: find without a GPU which collectives async tensor parallelism would fuse.

Exit status: 0 if all collectives that can be fused or overlapped are fused or overlapped, else 1.
"""

import inspect
import json
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch import nn

from titanplans import kernels, modeling
from titanplans.apply.apply import apply_plan
from titanplans.cli.verify.prepare import Prepared, prepare
from titanplans.cli.verify.screen import progress
from titanplans.cli.verify.smaller_config import kind
from titanplans.cli.verify.subject import Subject, every_model, find_subject
from titanplans.errors import UserError, VerifyError
from titanplans.kernels.install import MARK
from titanplans.observe.fusible import Verdict, capture, graph_breaks
from titanplans.parallel.compile import async_tp
from titanplans.parallel.compile.graph_breaks import calls_kernels, end_graphs_at_kernels
from titanplans.plan.degrees import Degrees
from titanplans.precision.float8.conversion import keep_plain_between_graphs
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.decoder import find_decoder
from titanplans.split.layout import next_multiple
from titanplans.split.stages.trace import logits_of
from titanplans.text import columns, counted
from titanplans.torch_private.compile import dynamo_errors, is_disabled

_TOKENS = 128
"""The minimum sequence length. With up to 64 tokens FLA's mixers use another kernel."""


@dataclass(frozen=True)
class Blocks:
    """A group of blocks whose collectives have the same verdicts."""

    title: str
    names: tuple[str, ...]
    graphs: int
    """Number of forward graphs of each block."""
    collectives: tuple[Verdict, ...]


@dataclass(frozen=True)
class Decision:
    """The collectives that would be fused at one degree."""

    subject: str
    degree: int
    batch_size: int
    seq_len: int
    notes: tuple[str, ...]
    blocks: tuple[Blocks, ...]
    graph_breaks: Mapping[str, int]
    """The number of graph breaks in the captured blocks, by function."""
    seconds: float

    def count(self, *, backward: bool) -> dict[str, int]:
        """Return how many collectives are fused, how many are overlapped, and their total number, in one block of each
        kind."""
        verdicts = [v for blocks in self.blocks for v in blocks.collectives if v.backward == backward]
        fused = sum(v.fused for v in verdicts)
        return {"fused": fused, "overlapped": sum(v.hidden for v in verdicts) - fused, "total": len(verdicts)}

    @property
    def complete(self) -> bool:
        """Whether all collectives that can be fused or overlapped are fused or overlapped."""
        return all(v.hidden or not v.possible for b in self.blocks for v in b.collectives)

    def text(self) -> str:
        """Return a table for each kind of block, and the verdict on the last line."""
        lines = [
            self.subject,
            f"  tp {self.degree}, {self.batch_size} sequences of {self.seq_len} tokens; graphs of torch "
            f"{torch.__version__.partition('+')[0]}, on no GPU",
            *(f"  {note}" for note in self.notes),
        ]
        for blocks in self.blocks:
            rows = [
                (
                    "backward" if v.backward else "forward",
                    v.operation.replace("_", "-"),
                    v.module,
                    _outcome(v),
                )
                for v in blocks.collectives
            ]
            lines += ["", f"{len(blocks.names)} x {blocks.title}, {counted(blocks.graphs, 'graph')}"]
            lines += [f"  {line}" for line in columns(rows)]
        if self.graph_breaks:
            ends = ", ".join(f"{name} ({number})" for name, number in self.graph_breaks.items())
            lines += ["", f"graphs end at {ends}"]
        counts = []
        for direction in ("forward", "backward"):
            fused, overlapped, total = self.count(backward=direction == "backward").values()
            rest = f" ({overlapped} overlapped)" if overlapped else ""
            counts.append(f"{direction} {fused + overlapped} of {total}{rest}")
        all_or_not = (
            "every collective that can be fused or overlapped with products is fused or overlapped"
            if self.complete
            else "NOT every collective that could be fused or overlapped is fused or overlapped"
        )
        return "\n".join([*lines, "", f"{all_or_not}: {', '.join(counts)}; {self.seconds:.1f} s"])

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as a dict for JSON."""
        return asdict(self) | {
            "torch": torch.__version__,
            "complete": self.complete,
            "forward": self.count(backward=False),
            "backward": self.count(backward=True),
            "seconds": round(self.seconds, 2),
        }


def _outcome(verdict: Verdict) -> str:
    if verdict.fused:
        rest = f", {verdict.obstacle}" if verdict.obstacle else ""
        return f"fused with {', '.join(verdict.products) or 'its product'}{rest}"
    if verdict.overlapped:
        return f"overlapped with {', '.join(verdict.overlapped)}; not fused: {verdict.obstacle}"
    return f"{'not fused' if verdict.possible else 'not supported'}: {verdict.obstacle}"


def main(request: Namespace) -> int:
    """Print the decision for each model and degree of `request`; return the exit status.

    Raises:
        UserError: `decide` raises it, and only one model is requested.
    """
    kernels.install("cpu")
    decisions, failures = [], {}
    for name in every_model() if request.all else [request.subject or ""]:
        try:
            subject = find_subject(name, request)
            for degrees in subject.degrees or (Degrees(tp=2),):
                if max(degrees.cp, degrees.ep, degrees.pp) > 1:
                    raise VerifyError(
                        f"async-tp {name}: {degrees}: with context, expert or pipeline parallelism some code of each block "
                        "runs outside of its graph, which this command does not examine: set these degrees to 1 in the job"
                    )
                with redirect_stdout(sys.stderr), progress(name, shown=True) as show:
                    decisions.append(decide(subject, request, degrees.tp, show))
                if not request.json:
                    print(decisions[-1].text(), end="\n\n", flush=True)
        except UserError as error:
            if not request.all:
                raise
            failures[name] = str(error)
            print(f"error: {error}", file=sys.stderr)
    if request.json:
        dicts = [decision.to_dict() for decision in decisions]
        all_decisions = {"decisions": dicts} | ({"errors": failures} if failures else {})
        print(json.dumps(dicts[0] if len(dicts) == 1 and not request.all else all_decisions))
    return 0 if not failures and all(decision.complete for decision in decisions) else 1


def decide(subject: Subject, request: Namespace, degree: int, progress: Callable[[str], None]) -> Decision:
    """Determine what async tensor parallelism would fuse in `subject` at one degree.

    Raises:
        UserError: this can't be determined, or the plan does not fit the model or the degree.
    """
    start = time.perf_counter()
    if subject.sequence_parallel is False:
        raise VerifyError(
            f"async-tp {request.subject}: without sequence parallelism there are only all-reduces, which torch's pass does "
            "not fuse: enable sequence parallelism"
        )
    progress("the model")
    prepared = _prepare(subject, request, degree)
    model = prepared.model
    decoder = find_decoder(model, required=False)
    if not decoder.blocks:
        raise VerifyError(
            f"async-tp {request.subject}: {type(model).__name__} has no list of blocks to compile"
        )
    names_by_kind: dict[Any, list[str]] = {}
    for block in decoder.blocks:
        names_by_kind.setdefault((kind(block.module), block.kind), []).append(block.name)
    inputs = prepared.inputs(prepared.batch_size, prepared.seq_len, 0)
    with fake_ranks(degree) as mesh:
        apply_plan(model, mesh, plan=subject.plan, loss_parallel=False)
        if any(p.is_meta for p in model.parameters()):
            # The values don't matter: the collectives of fake ranks return arbitrary values.
            model.to_empty(device="cpu")
            modeling.initialize(model, seed=0)  # pyrefly: ignore[bad-argument-type]  `modeling.build` made it
        async_tp.prepare(model)
        progress("the graphs")
        firsts, group = [names[0] for names in names_by_kind.values()], mesh.get_group().group_name

        def run() -> None:
            logits_of(model(**inputs)).float().sum().backward()

        try:
            with graphs_end_as_on_a_gpu():
                captured = capture(model, firsts, run, group, prepare_block, async_tp.install_passes)
        except (dynamo_errors().TorchDynamoException, AssertionError) as error:  # dynamo's own assertions
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise VerifyError(
                f"async-tp {request.subject}: the blocks can't be compiled as in training: {reason}: remove options such "
                "as float8, or see TORCH_LOGS=+dynamo"
            ) from error
    blocks_by_verdicts: dict[Any, Blocks] = {}
    for (_, title), names in names_by_kind.items():
        graphs = captured[names[0]]
        verdicts = tuple(verdict for graph in graphs for verdict in graph.verdicts)
        forward_graphs = sum(not graph.backward for graph in graphs)
        blocks = blocks_by_verdicts.get((title, verdicts), Blocks(title, (), forward_graphs, verdicts))
        blocks_by_verdicts[title, verdicts] = replace(blocks, names=(*blocks.names, *names))
    return Decision(
        subject.words,
        degree,
        prepared.batch_size,
        prepared.seq_len,
        prepared.notes,
        tuple(blocks_by_verdicts.values()),
        graph_breaks(),
        time.perf_counter() - start,
    )


def _prepare(subject: Subject, request: Namespace, degree: int) -> Prepared:
    """Prepare the model like for a proof, in float32, with sequences of at least `_TOKENS` unless a length is requested."""
    # float8 is not emulated, so that graphs have the float8 products of a GPU.
    unemulated = replace(subject, float8=subject.float8.replace(emulate=False))
    prepared = prepare(unemulated, request, torch.device("cpu"), torch.float32)
    keep_plain_between_graphs(prepared.model)
    if request.seq_len is not None:
        return prepared
    return replace(prepared, seq_len=next_multiple(max(_TOKENS, prepared.seq_len), degree))


def prepare_block(block: nn.Module) -> bool:
    """Place graph breaks at the block's kernels of flash-linear-attention; return whether the block is one graph."""
    if has_breaks := calls_kernels(block):
        end_graphs_at_kernels(block)
    return not has_breaks


@contextmanager
def graphs_end_as_on_a_gpu() -> Iterator[None]:
    """In the body, exclude the CPU replacement of a function from graphs if FLA excludes the original function."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            for key, value in list(vars(module).items()) if name.partition(".")[0] == "fla" else ():
                if (
                    isinstance(value, FunctionType)
                    and hasattr(value, MARK)
                    and is_disabled(inspect.getclosurevars(value).nonlocals.get("original"))
                ):
                    stack.callback(setattr, module, key, value)
                    setattr(module, key, torch.compiler.disable(value))
        yield
