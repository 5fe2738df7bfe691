"""Every operator on every key of every plan, once for those that agree there.

Two plans agree at a key if they give the same style to the same part of a model of the same library
(`Site.likeness`), and the module has no parameter that the other's has not: llama's projections with biases stand
for all without.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn

from tests.support.mutants.architectures import ARCHITECTURES, Architecture
from tests.support.mutants.operators import (
    AT_SHARED_HEADS,
    BACKWARD,
    BLIND,
    DROP,
    FORWARD,
    SKIP,
    Change,
    shift_half,
    summed_again,
)
from tests.support.mutants.site import Site
from titanplans import Degrees, TPOptions, TPPlan
from titanplans.plan.plan import Plan
from titanplans.split.decoder import find_decoder
from titanplans.styles.base import SplitOver, Style
from titanplans.styles.kv_colwise import KVColwise
from titanplans.styles.replicated_off_stream import ReplicatedOffStream

LOCAL_ATTRIBUTES = "local_attributes"
"""The one operator that is not done to a style: a mixer keeps the attributes of the whole one."""


@dataclass(frozen=True)
class Mutant:
    """A registered plan with one fault, and the options of the case in which it is proved."""

    architecture: Architecture
    key: str
    operator: str
    options: TPOptions
    plan: type[TPPlan]
    likeness: tuple = ()
    change: Change = DROP

    def __str__(self) -> str:
        sequence = "sharded" if self.options.sequence_parallel else "whole"
        return f"{self.architecture.name}, tp {self.options.degrees.tp}, sequence {sequence}: {self.operator} at {self.key}"

    @property
    def effect(self) -> object:
        """What two mutants have in common that differ in their words only: styles without hooks, the same layouts."""
        style = self.change
        if not isinstance(style, Style) or type(style).by_weights is not Style.by_weights:
            return self
        module = self.architecture.reference().pristine.get_submodule(self.key)
        over = SplitOver(self.options.degrees.tp, self.options.stream)
        return self.key, self.options, tuple(sorted(style.layouts(module, over).items()))


@cache
def corpus() -> dict[Architecture, list[Mutant]]:
    """Return the mutants of each architecture that none above it has."""
    seen: dict[tuple, list[set[str]]] = {}
    found = {}
    for architecture in ARCHITECTURES:
        found[architecture] = []
        for mutant in list(mutants(architecture)):
            before = seen.setdefault((mutant.operator, mutant.options, mutant.likeness), [])
            module = architecture.reference().pristine.get_submodule(mutant.key)
            held = {name for name, param in module._parameters.items() if param is not None}
            if not any(held <= other for other in before):
                found[architecture].append(mutant)
            before.append(held)
    return found


def mutants(architecture: Architecture) -> Iterator[Mutant]:
    """Yield all mutants of one plan: at tp 2, and at tp 4 those of key/value heads, which are shared there.

    With the sequence sharded and with the sequence whole, where that makes a difference.
    """
    model = architecture.reference().pristine
    for degree in (2, 4):
        for sequence_parallel in (True, False):
            options = TPOptions(Degrees(tp=degree), True, sequence_parallel)
            yield from _of_styles(architecture, model, options)
            yield from _of_attributes(architecture, model, options)


def _of_styles(architecture: Architecture, model: nn.Module, options: TPOptions) -> Iterator[Mutant]:
    source = architecture.plan(options)
    blocks = find_decoder(model).names
    sharing = options.degrees.tp > 2
    for key, style in source.full_plan(model).items():
        block = next((name for name in blocks if key.startswith(f"{name}.")), None)
        if (
            sharing
            and not (isinstance(style, KVColwise) and options.degrees.tp > style.heads)
            and not key.endswith("k_norm")
        ):
            continue
        for operator in (*FORWARD, *BACKWARD):
            if block not in (None, blocks[0] if operator in FORWARD else blocks[-1]):
                continue
            if sharing and operator not in AT_SHARED_HEADS:
                continue
            if options.sequence_parallel == (operator is shift_half) and _blind(operator, style):
                continue
            site = Site(key, style, model, source)
            if (change := operator(site)) != SKIP:
                plan = mutated(architecture.plan, key, operator)
                yield Mutant(architecture, key, operator.__name__, options, plan, site.likeness, change)


def _of_attributes(architecture: Architecture, model: nn.Module, options: TPOptions) -> Iterator[Mutant]:
    source = architecture.plan(options)
    key, mixer = next(iter(find_decoder(model).mixers.items()))
    local = source.local_attributes(mixer) | source.queries_per_group(mixer)
    if options.sequence_parallel and local:
        yield Mutant(
            architecture,
            key,
            LOCAL_ATTRIBUTES,
            options,
            forgetful(architecture.plan, mixer),
            (type(mixer), *local),
        )


def _blind(operator: Callable[[Site], Change], style: Style) -> bool:
    """Whether it makes no difference to the fault how the sequence is laid out, so that one case is enough."""
    return (operator in BLIND and style.is_inside_region) or (
        operator is summed_again and isinstance(style, ReplicatedOffStream)
    )


def mutated(base: type[TPPlan], key: str, operator: Callable[[Site], Change]) -> type[TPPlan]:
    """Return `base` with the style of `key` changed by `operator`."""

    class Mutated(base):  # type: ignore[misc, valid-type]
        def full_plan(self, model: nn.Module) -> Plan:
            plan = super().full_plan(model)
            # In its place: of tied weights the first one counts.
            plan[key] = operator(Site(key, plan[key], model, self))
            return {name: style for name, style in plan.items() if style != DROP}

    return Mutated


def forgetful(base: type[TPPlan], mixer: nn.Module) -> type[TPPlan]:
    """Return `base`, which leaves the attributes of the first block's mixer as they were."""

    class Forgetful(base):  # type: ignore[misc, valid-type]
        def local_attributes(self, attn: nn.Module) -> dict[str, int]:
            return {} if attn.layer_idx == mixer.layer_idx else super().local_attributes(attn)

        def queries_per_group(self, attn: nn.Module) -> dict[str, int]:
            return {} if attn.layer_idx == mixer.layer_idx else super().queries_per_group(attn)

    return Forgetful
