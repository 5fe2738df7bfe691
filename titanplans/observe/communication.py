"""Compares the collectives of a split model with the fewest that it needs. Start at `count_communication`.

`recorder` records the issued collectives, and `bound` computes the needed ones. Elements are counted in full tensors, as
in published formulas. Bytes are counted as one rank receives them on a ring.
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
from titanplans.observe.bound import Allowance, Allowances, bound, exceeding, part_of, record_calls
from titanplans.observe.by_tokens import FullSequenceGathers, full_sequence_gathers
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
    """The collectives, in the order in which they were issued."""

    bounds: Mapping[str, Allowances]
    """The needed collectives of each part of the model, such as a block, by name (see `titanplans.observe.bound`)."""

    gradients: Mapping[str, int]
    """For each replicated parameter whose gradient is summed over the ranks once a step: its size in bytes, by name."""

    decoder: Decoder

    full_sequence_gathers: FullSequenceGathers
    """Tells which collectives gather all tokens under context parallelism, in addition to the bound."""

    def of(self, part: str, direction: str) -> list[Collective]:
        """Return the collectives of a part in "forward" or "backward", in the order in which they were issued."""
        return [
            c
            for c in self.collectives
            if _direction(c) == direction and part_of(c.module, self.decoder) == part
        ]

    def needed(self, part: str, direction: str) -> tuple[Allowance, ...]:
        """Return the collectives that a part needs in "forward" or "backward"."""
        return self.bounds.get(part, Allowances())[_DIRECTIONS.index(direction)]

    def exceeding(self, part: str, direction: str) -> list[Collective]:
        """Return the collectives of a part that exceed what it needs, in number or in size."""
        return [c for c in self._beyond_bound(part, direction) if not self.full_sequence_gathers.holds(c)]

    @property
    def gathered(self) -> list[Collective]:
        """The collectives that gather all tokens for code that needs them, or scatter their gradients."""
        parts = itertools.product(self.parts, _DIRECTIONS)
        return [c for part in parts for c in self._beyond_bound(*part) if self.full_sequence_gathers.holds(c)]

    def _beyond_bound(self, part: str, direction: str) -> list[Collective]:
        return exceeding(self.of(part, direction), self.needed(part, direction))

    @property
    def parts(self) -> list[str]:
        """Names of the parts that have a bound, then of the other parts that issue a collective."""
        issuers = (part_of(c.module, self.decoder) for c in self.collectives)
        return list(dict.fromkeys([*self.bounds, *issuers]))

    @property
    def minimal(self) -> bool:
        """Whether no part exceeds the bound."""
        return not any(self.exceeding(part, direction) for part in self.parts for direction in _DIRECTIONS)

    def lines(self) -> list[str]:
        """Return a table with a forward and a backward line for each group of equal parts, and what exceeds the bound."""
        rows = [("", "", "collectives", "needed", "received by a rank")]
        excess = []
        for label, (part, *_) in self._groups():
            for direction in _DIRECTIONS:
                issued, needed = self.of(part, direction), self.needed(part, direction)
                if issued or needed:
                    received = format_bytes(sum(c.received or 0 for c in issued)) if issued else ""
                    counts = _counts([c.operation] for c in issued), _counts(a.operations for a in needed)
                    rows.append(("" if rows[-1][0] == label else label, direction, *counts, received))
                excess += [
                    f"more than is needed: {direction} {_dashed(c.operation)} of {c.elements:,} elements "
                    f"{'outside of the model' if c.module is None else f'at {c.module}' if c.module else 'in the model'}"
                    for c in self.exceeding(part, direction)
                ]
        return [
            *columns(rows),
            *excess,
            *self.full_sequence_gathers.lines(self.gathered),
            *self._gradient_line(),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the count as JSON types, with the collectives of the first part of each group of equal parts."""
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
                for label, parts in self._groups()
            ],
            "gathered": [_as_json(c) for c in self.gathered],
            "gradients": dict(self.gradients),
        }

    def _groups(self) -> Iterator[tuple[str, list[str]]]:
        """Yield groups of parts with a label: blocks of one kind with equal collectives together, other parts alone."""
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
        model: a causal language model that `apply_plan` has split. Without FSDP, whose collectives would exceed the bound.
            `recorder` lists the process groups on which it can run.
        applied: what `apply_plan` returned.
        run: runs one forward, the loss and its backward. With loss parallelism, a loss that gathers the logits exceeds the
            bound.
        options: the options of the bound, usually those of the applied plan.

    Raises:
        PlanError: activations are checkpointed.
        NotImplementedError: an operator that communicates is not in the table of `operators`.
    """
    with record_collectives(model) as record, record_calls(model, applied) as calls:
        run()
    if record.failure is not None:
        raise NotImplementedError(record.failure)  # an incomplete record proves nothing
    if (
        recomputed := next((c.module for c in record.collectives if c.phase == "recomputed"), None)
    ) is not None:
        raise PlanError(
            f"{recomputed} is called again in the backward: count the communication without activation checkpointing, since "
            "a recomputed forward adds its collectives, whatever the plan"
        )
    return Communication(
        tuple(record.collectives),
        bound(model, applied, options, calls),
        summed_gradients(model),
        applied.decoder,
        full_sequence_gathers(applied, calls),
    )


def summed_gradients(model: nn.Module) -> dict[str, int]:
    """Return the bytes of each parameter whose gradient is Partial and summed over the ranks once a step, by name."""
    partial = {
        join(path, name)
        for path, module in model.named_modules()
        for name, spec in local_specs(module).items()
        if any(placement.is_partial() for placement in spec.gradient)
    }
    return {
        name: local_tensor(param).nbytes
        for name, param in model.named_parameters()  # a tied parameter is yielded once
        if param.requires_grad and name in partial and isinstance(param, DTensor)
    }


def _direction(collective: Collective) -> str:
    return _DIRECTIONS[collective.phase == "backward"]


def _as_json(collective: Collective) -> dict[str, Any]:
    names = ("operation", "module", "phase", "elements", "bytes", "ranks", "received")
    return {name: getattr(collective, name) for name in names}


def _counts(operations: Iterable[Iterable[str]]) -> str:
    """Return the number of each operation in words. Several names in one item are alternatives."""
    counts = Counter(" or ".join(map(_dashed, names)) for names in operations)
    return ", ".join(f"{number} {names}" for names, number in sorted(counts.items())) or "none"


def _dashed(operation: str) -> str:
    return operation.replace("_", "-")
