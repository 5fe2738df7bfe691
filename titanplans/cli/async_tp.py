"""`titanplans async-tp`: what async tensor parallelism would fuse, decided without a GPU.

Exit status: 0 all is fused or overlapped that can be, 1 not all.
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
"""In a sequence: more than the 64 up to which FLA's mixers take another kernel."""


@dataclass(frozen=True)
class Blocks:
    """Blocks whose collectives have the same verdicts."""

    title: str
    names: tuple[str, ...]
    graphs: int
    """Graphs that each becomes, forward."""
    collectives: tuple[Verdict, ...]


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

    def count(self, *, backward: bool) -> dict[str, int]:
        """Return how many collectives are fused and overlapped, of how many, in one block of each kind together."""
        those = [v for blocks in self.blocks for v in blocks.collectives if v.backward == backward]
        fused = sum(v.fused for v in those)
        return {"fused": fused, "overlapped": sum(v.hidden for v in those) - fused, "total": len(those)}

    @property
    def complete(self) -> bool:
        """Whether everything is fused or overlapped, but for what no other graph could hide."""
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
            "all that can be is fused or overlapped with products"
            if self.complete
            else "NOT all is fused or overlapped that could be"
        )
        return "\n".join([*lines, "", f"{all_or_not}: {', '.join(counts)}; {self.seconds:.1f} s"])

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as JSON has it."""
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
    """Decide what `request` asks, or raise a UserError, and print it; return the exit status."""
    kernels.install("cpu")
    decisions, failures = [], {}
    for name in every_model() if request.all else [request.subject or ""]:
        try:
            subject = find_subject(name, request)
            for cut in subject.degrees or (Degrees(tp=2),):
                if max(cut.cp, cut.ep, cut.pp) > 1:
                    raise VerifyError(
                        f"async-tp {name}: {cut}: with context or expert parallelism a part of each block runs outside of "
                        "its graph, and is not decided here; set both degrees to 1 in the job"
                    )
                with redirect_stdout(sys.stderr), progress(name, shown=True) as show:
                    decisions.append(decide(subject, request, cut.tp, show))
                if not request.json:
                    print(decisions[-1].text(), end="\n\n", flush=True)
        except UserError as error:
            if not request.all:
                raise
            failures[name] = str(error)
            print(f"error: {error}", file=sys.stderr)
    if request.json:
        found = [decision.to_dict() for decision in decisions]
        several = {"decisions": found} | ({"errors": failures} if failures else {})
        print(json.dumps(found[0] if len(found) == 1 and not request.all else several))
    return 0 if not failures and all(decision.complete for decision in decisions) else 1


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
    alike: dict[Any, list[str]] = {}
    for block in decoder.blocks:
        alike.setdefault((kind(block.module), block.kind), []).append(block.name)
    inputs = prepared.inputs(prepared.batch_size, prepared.seq_len, 0)
    with fake_ranks(degree) as mesh:
        apply_plan(model, mesh, plan=subject.plan, loss_parallel=False)
        if any(p.is_meta for p in model.parameters()):
            # Collectives of ranks that don't exist give any values.
            model.to_empty(device="cpu")
            modeling.initialize(model, seed=0)  # pyrefly: ignore[bad-argument-type]  `modeling.build` made it
        async_tp.prepare(model)
        progress("the graphs")
        firsts, group = [names[0] for names in alike.values()], mesh.get_group().group_name

        def run() -> None:
            logits_of(model(**inputs)).float().sum().backward()

        try:
            with graphs_end_as_on_a_gpu():
                captured = capture(model, firsts, run, group, prepare_block, async_tp.install_passes)
        except (dynamo_errors().TorchDynamoException, AssertionError) as error:  # dynamo's own assertions
            reason = str(error.__cause__ or error).strip().splitlines()[0]
            raise VerifyError(
                f"async-tp {request.subject}: the blocks can't be compiled as in training: {reason}; leave out what is "
                "special, such as float8, or see TORCH_LOGS=+dynamo"
            ) from error
    found: dict[Any, Blocks] = {}
    for (_, title), names in alike.items():
        graphs = captured[names[0]]
        verdicts = tuple(verdict for graph in graphs for verdict in graph.verdicts)
        number = sum(not graph.backward for graph in graphs)
        held = found.get((title, verdicts), Blocks(title, (), number, verdicts))
        found[title, verdicts] = replace(held, names=(*held.names, *names))
    return Decision(
        subject.words,
        degree,
        prepared.batch_size,
        prepared.seq_len,
        prepared.notes,
        tuple(found.values()),
        graph_breaks(),
        time.perf_counter() - start,
    )


def _prepare(subject: Subject, request: Namespace, degree: int) -> Prepared:
    """Prepare the model as for a proof, in float32, with enough tokens for what depends on their number."""
    # The products that a GPU has.
    unemulated = replace(subject, float8=subject.float8.replace(emulate=False))
    prepared = prepare(unemulated, request, torch.device("cpu"), torch.float32)
    keep_plain_between_graphs(prepared.model)
    if request.seq_len is not None:
        return prepared
    return replace(prepared, seq_len=next_multiple(max(_TOKENS, prepared.seq_len), degree))


def prepare_block(block: nn.Module) -> bool:
    """Let the graphs of a block end at the kernels of flash-linear-attention; return whether it is one graph."""
    if several := calls_kernels(block):
        end_graphs_at_kernels(block)
    return not several


@contextmanager
def graphs_end_as_on_a_gpu() -> Iterator[None]:
    """Take the CPU's functions out of every graph whose originals FLA takes out, inside of the context alone."""
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
