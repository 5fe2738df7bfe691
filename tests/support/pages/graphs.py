"""Compile every registered architecture under tensor parallelism: losses, graphs, graph breaks, and their table.

    python docs/generate.py graphs.md     # writes the table into docs/generated/graphs.md; takes a few minutes

The models of tests/zoo.py run on two gloo ranks, with sequence and loss parallelism, and AdamW.
"""

import re
import sys
from collections import Counter
from typing import NamedTuple

import torch

from tests import zoo
from tests.support import process_groups
from tests.support.paths import GENERATED
from titanplans.text import class_name

PAGE = GENERATED / "graphs.md"
BEGIN, END = "<!-- table: tests/support/pages/graphs.py -->\n", "<!-- end of table -->\n"
BATCH, LENGTH, STEPS = 2, 16, 3
OTHER_LENGTHS = (24, 30)
"""Sequence lengths that run after `LENGTH`. GLA pads both to chunks of 32."""
DIFFERENT = ("transformer", "gla", "gemma3")
"""Blocks of any other architecture are like the blocks of one of these architectures, without some norm, bias or mask.
test_combinations.py compiles Qwen3's blocks."""
KERNELS = ("gla",)
"""The architectures that inductor compiles. The others are compiled by aot_eager, which makes the same graphs and saves the
seconds that C++ compilation takes."""

BOTH_KINDS = dict(layer_types=["sliding_attention", "full_attention"])
MORE = {"gemma3_text": BOTH_KINDS, "gemma3": BOTH_KINDS}
"""Fields of the config that differ from the zoo's."""


class Block(NamedTuple):
    """The graphs and graph breaks of the first call of one kind of block."""

    name: str
    kind: str
    graphs: int
    breaks: dict[str, int]


class Result(NamedTuple):
    """Measurements of one architecture on rank 0."""

    eager: list[tuple[float, float]]
    """Loss and gradient norm of each step."""
    compiled: list[tuple[float, float]]
    blocks: list[Block]
    """The first block of each kind, in the order in which they ran."""
    calls: dict[str, int]
    """The number of compiled calls of each block."""
    graphs: list[int]
    """The number of graphs that this process has compiled after each step."""


def parallel(name, compiled, **sizes):
    """Return the split model, its loss, the optimizer and the manager; `compiled` is a backend, or None for eager."""
    from titanplans.parallel import Compile, Degrees, FSDP2Config, ParallelManager

    options = {"compile": Compile(enable=True, backend=compiled)} if compiled else {}
    manager = ParallelManager(FSDP2Config(**options), Degrees(tp=2), device_type="cpu")
    model = zoo.build(name, dtype=torch.float32, options=False, **MORE.get(name, {}) | sizes)
    model = manager.parallelize(model)
    loss = manager.prepare_loss(manager.cross_entropy)
    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-3), manager


def step(model, loss, optimizer, manager, seed, length=LENGTH):
    """Run a training step on tokens (and images) that depend on `seed`; return the loss and the gradient norm."""
    from titanplans import modeling

    inputs = modeling.sample_inputs(model.config, batch_size=BATCH, seq_len=length, seed=seed)
    value = loss(model(**inputs, use_cache=False).logits, inputs["input_ids"].roll(-1, 1))
    value.backward()
    norm = manager.clip_gradients(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return value.item(), norm.item()


def watch(model):
    """Return two dicts that fill while the model runs: each compiled block's graphs, and its number of calls."""
    from torch._dynamo.utils import counters

    from titanplans.split.decoder import find_decoder

    first: dict[str, Block] = {}
    calls: Counter[str] = Counter()

    def watched(name, block, compiled):
        def call(*args, **kwargs):
            graphs, breaks = counters["stats"]["unique_graphs"], Counter(counters["graph_break"])
            output = compiled(*args, **kwargs)
            calls[name] += 1
            if calls[name] == 1:
                new = Counter(counters["graph_break"]) - breaks
                kind = class_name(block).removeprefix("FSDP") + variant(block)
                first[name] = Block(
                    name,
                    kind,
                    counters["stats"]["unique_graphs"] - graphs,
                    {reason(r): n for r, n in new.items()},
                )
            return output

        return call

    for name in (name for names in find_decoder(model).block_lists for name in names):
        block = model.get_submodule(name)
        block._compiled_call_impl = watched(name, block, block._compiled_call_impl)
    return first, calls


def variant(block):
    """Return the kind of attention of a block of Gemma 3, which has one class for both kinds; "" for other blocks."""
    sliding = getattr(getattr(block, "self_attn", None), "is_sliding", None)
    return "" if sliding is None else ", sliding" if sliding else ", full"


def reason(text):
    """Return the class of FLA whose kernel call broke the graph, or else the first line of torch's reason."""
    ours = re.search(r"reason: (\w+) calls a kernel of flash-linear-attention", text)
    return ours[1] if ours else text.partition("\n")[0]


def run(rank, names=tuple(zoo.ARCHITECTURES), inductor=KERNELS):
    """Run the architectures `names` on this rank: those in `inductor` compiled by inductor, the others by aot_eager."""
    from torch._dynamo.utils import counters

    results = {}
    for name in names:
        torch._dynamo.reset()
        counters.clear()
        eager = parallel(name, None)
        expected = [step(*eager, seed) for seed in range(STEPS)]
        compiled = parallel(name, "inductor" if name in inductor else "aot_eager")
        first, calls = watch(compiled[0])
        losses, graphs = [], []
        for seed in range(STEPS):
            losses.append(step(*compiled, seed))
            graphs.append(counters["stats"]["unique_graphs"])
        results[name] = Result(expected, losses, kinds(first), dict(calls), graphs)
    return results


def lengths(name):
    """Return the number of graphs after steps of each length, compiled by aot_eager on one rank of a fake group of two.

    The collectives return arbitrary values, so the losses mean nothing.
    """
    from torch._dynamo.utils import counters

    from titanplans.proof.ranks.fake import fake_ranks

    torch._dynamo.reset()
    counters.clear()
    graphs = []
    with fake_ranks(2):
        model = parallel(name, "aot_eager", **({} if name in MORE else {"num_hidden_layers": 1}))
        for length in (LENGTH, *OTHER_LENGTHS):
            step(*model, 0, length)
            graphs.append(counters["stats"]["unique_graphs"])
    return graphs


def kinds(first):
    """Return the first block of each kind."""
    by_kind = {}
    for block in first.values():
        by_kind.setdefault(block.kind, block)
    return list(by_kind.values())


def table(results):
    """Return the table of docs/generated/graphs.md."""
    rows = [
        "| architecture | block | graphs | graph breaks: what ends a graph |",
        "|---|---|---:|---|",
    ]
    for name, result in results.items():
        for block in result.blocks:
            breaks = ", ".join(f"{n} x {why}" for why, n in block.breaks.items()) or "none"
            rows.append(f"| {name} | {block.kind} | {block.graphs or 'those of the row above'} | {breaks} |")
    return "\n".join(rows) + "\n"


def written(page):
    """Return the table in the text of a page."""
    return page.partition(BEGIN)[2].partition(END)[0]


def main():
    """Write the table into the page, and print how much compiled losses differ from eager ones."""
    if sys.argv[1:] != ["--page"]:
        print(__doc__)
        return 2
    results = process_groups.run(run, 2)
    for name, result in results.items():
        pairs = zip(result.compiled, result.eager, strict=True)
        print(name, max(abs(compiled / eager - 1) for (compiled, _), (eager, _) in pairs))
    head, _, tail = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{head}{BEGIN}{table(results)}{END}{tail.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
