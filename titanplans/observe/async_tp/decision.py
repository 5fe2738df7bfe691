"""One split model, decided: its blocks' graphs captured, each collective judged, equal blocks told once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from titanplans.observe.async_tp.capture import capture
from titanplans.observe.async_tp.verdict import BEGINS, Verdict, verdicts


@dataclass(frozen=True)
class Blocks:
    """Blocks whose collectives have the same verdicts."""

    title: str
    names: tuple[str, ...]
    """Their names; none for the gather where the stream begins, which is told apart."""

    graphs: int
    """Graphs that each becomes, forward."""

    verdicts: tuple[Verdict, ...]

    def count(self, *, backward: bool) -> tuple[int, int]:
        """Return how many collectives are fused, of how many."""
        those = [v for v in self.verdicts if v.backward == backward]
        return sum(v.fused for v in those), len(those)


def decide_blocks(
    model: nn.Module,
    alike: Mapping[str, tuple[str, ...]],
    kinds: Mapping[str, str],
    run: Callable[[], object],
    group: str,
    prepare: Callable[[nn.Module], bool],
) -> tuple[Blocks, ...]:
    """Decide what async tensor parallelism would fuse in the blocks of `model`.

    Args:
        model: split by its plan over ranks that do not exist, on the CPU.
        alike: of each kind of block, the first one's name and those of all. The first of all, where the stream may
            begin, is one.
        kinds: each block's kind, as words.
        run: runs forward and backward.
        group: name of the TP group.
        prepare: as for `capture`.
    """
    captured = capture(model, alike, run, group, prepare)
    found: dict[Any, Blocks] = {}
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
