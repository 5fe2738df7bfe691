"""The collectives of a split model, compared with the fewest that it needs, part by part, forward and backward.

`recorder` records the issued ones, `bound` gives the needed ones. Numbers of elements are of whole tensors,
as the published formulas count; bytes are what one rank receives on a ring.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from titanplans.apply.apply import AppliedPlan
from titanplans.errors import PlanError
from titanplans.observe.bound import Allowance, Allowances, bound, exceeding, noted_calls, part_of
from titanplans.observe.by_tokens import ReadWhole, read_whole
from titanplans.observe.operators import Collective
from titanplans.observe.recorder import record_collectives
from titanplans.plan.options import TPOptions
from titanplans.split.decoder import Decoder, join
from titanplans.split.module_weight import local_specs
from titanplans.text import columns, format_bytes
from titanplans.torch_private.dtensor import local_tensor

_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Communication:
    """The collectives of one forward and backward of a split model, and the bound."""

    collectives: tuple[Collective, ...]
    """In the order in which they were issued."""

    bounds: Mapping[str, Allowances]
    """By part: see `titanplans.observe.bound`."""

    gradients: Mapping[str, int]
    """Bytes of each replicated parameter whose gradient is reduced once a step, by name."""

    decoder: Decoder

    read_whole: ReadWhole
    """What code reads of all tokens where those are cut: in addition to the bound."""

    def of(self, part: str, direction: str) -> list[Collective]:
        """Return the collectives of a part, "forward" or "backward", in the order of issue."""
        return [
            c
            for c in self.collectives
            if _direction(c) == direction and part_of(c.module, self.decoder) == part
        ]

    def needed(self, part: str, direction: str) -> tuple[Allowance, ...]:
        """Return the collectives that a part needs, "forward" or "backward"."""
        return self.bounds.get(part, Allowances())[_DIRECTIONS.index(direction)]

    def exceeding(self, part: str, direction: str) -> list[Collective]:
        """Return those of a part's collectives that are more, or larger, than it needs."""
        return [c for c in self._beside(part, direction) if not self.read_whole.holds(c)]

    @property
    def gathered(self) -> list[Collective]:
        """The collectives that bring code what it reads of all tokens where those are cut, or back."""
        parts = itertools.product(self.parts, _DIRECTIONS)
        return [c for part in parts for c in self._beside(*part) if self.read_whole.holds(c)]

    def _beside(self, part: str, direction: str) -> list[Collective]:
        return exceeding(self.of(part, direction), self.needed(part, direction))

    @property
    def parts(self) -> list[str]:
        """Blocks, then the ends, then whatever else issues a collective."""
        issuers = (part_of(c.module, self.decoder) for c in self.collectives)
        return list(dict.fromkeys([*self.bounds, *issuers]))

    @property
    def minimal(self) -> bool:
        """Whether no part exceeds the bound."""
        return not any(self.exceeding(part, direction) for part in self.parts for direction in _DIRECTIONS)

    def lines(self) -> list[str]:
        """Return a table, two lines for each kind of block and each end, and what exceeds the bound and where."""
        rows = [("", "", "collectives", "needed", "received by a rank")]
        over = []
        for label, (part, *_) in self._alike():
            for direction in _DIRECTIONS:
                held, needed = self.of(part, direction), self.needed(part, direction)
                if held or needed:
                    received = format_bytes(sum(c.received or 0 for c in held)) if held else ""
                    what = _numbers([c.operation] for c in held), _numbers(a.operations for a in needed)
                    rows.append(("" if rows[-1][0] == label else label, direction, *what, received))
                over += [
                    f"more than is needed: {direction} {_dashed(c.operation)} of {c.elements:,} elements "
                    f"{'outside of the model' if c.module is None else f'at {c.module}' if c.module else 'in the model'}"
                    for c in self.exceeding(part, direction)
                ]
        return [*columns(rows), *over, *self.read_whole.lines(self.gathered), *self._gradient_line()]

    def to_dict(self) -> dict[str, Any]:
        """Return the count as JSON has it: of parts that are alike, the first one's collectives."""
        return {
            "minimal": self.minimal,
            "parts": [
                {"name": label, "parts": parts}
                | {
                    direction: {
                        "collectives": [_as_json(c) for c in self.of(parts[0], direction)],
                        "needed": [a._asdict() for a in self.needed(parts[0], direction)],
                        "exceeding": [_as_json(c) for c in self.exceeding(parts[0], direction)],
                    }
                    for direction in _DIRECTIONS
                }
                for label, parts in self._alike()
            ],
            "gathered": [_as_json(c) for c in self.gathered],
            "gradients": dict(self.gradients),
        }

    def _alike(self) -> Iterator[tuple[str, list[str]]]:
        """Yield blocks of one kind that issue the same together, every other part by itself."""
        groups: dict[Any, list[str]] = {}
        kinds = {block.name: block.kind for block in self.decoder.blocks}
        for part in self.parts:
            issued = [tuple((c.operation, c.elements) for c in self.of(part, d)) for d in _DIRECTIONS]
            groups.setdefault((kinds.get(part, part), *issued), []).append(part)
        for (kind, *_), parts in groups.items():
            yield (f"{len(parts)} x {kind}" if parts[0] in kinds else kind), parts

    def _gradient_line(self) -> list[str]:
        size = format_bytes(sum(self.gradients.values()))
        words = f"once a step the gradients of {len(self.gradients)} replicated parameters are summed: {size}"
        return [words] if self.gradients else []


def count_communication(
    model: nn.Module,
    applied: AppliedPlan,
    run: Callable[[], object],
    options: TPOptions,
) -> Communication:
    """Count the collectives of one forward, loss and backward of a split model.

    Args:
        model: a causal language model that `apply_plan` has split, before FSDP, whose collectives would
            count as too many; where it may run is said in `recorder`.
        applied: what `apply_plan` returned.
        run: does one forward, the loss and its backward. With loss parallelism, a loss that
            gathers the logits is counted too, and exceeds the bound.
        options: those of the bound; as a rule `applied.plan.options`.

    Raises:
        PlanError: its activations are checkpointed.
        NotImplementedError: an operator that communicates is not in the table.
    """
    with record_collectives(model) as record, noted_calls(model, applied) as calls:
        run()
    if record.failure is not None:
        raise NotImplementedError(record.failure)  # a proof is not to rest on part of a record
    if (again := next((c.module for c in record.collectives if c.phase == "recomputed"), None)) is not None:
        raise PlanError(
            f"{again} is called again in the backward: count the "
            "communication without activation checkpointing, which adds its forward's collectives to every plan alike"
        )
    return Communication(
        tuple(record.collectives),
        bound(model, applied, options, calls),
        summed_gradients(model),
        applied.decoder,
        read_whole(applied, calls),
    )


def summed_gradients(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each parameter whose gradient is a sum over ranks that hold the same part, by name.

    FSDP or the optimizer, which reduces the gradients, sums them once a step: see `partial_gradients`.
    """
    partial = {
        join(path, name)
        for path, module in model.named_modules()
        for name, spec in local_specs(module).items()
        if any(placement.is_partial() for placement in spec.gradient)
    }
    return {
        name: local_tensor(param).nbytes
        for name, param in model.named_parameters()  # tied ones once
        if param.requires_grad and name in partial and isinstance(param, DTensor)
    }


def _direction(collective: Collective) -> str:
    return _DIRECTIONS[collective.phase == "backward"]


def _as_json(collective: Collective) -> dict[str, Any]:
    names = ("operation", "module", "phase", "elements", "bytes", "ranks", "received")
    return {name: getattr(collective, name) for name in names}


def _numbers(operations: Iterable[Iterable[str]]) -> str:
    """Return how many there are of each, as words, where several names are alternatives."""
    counts = Counter(" or ".join(map(_dashed, names)) for names in operations)
    return ", ".join(f"{number} {names}" for names, number in sorted(counts.items())) or "none"


def _dashed(operation: str) -> str:
    return operation.replace("_", "-")
