"""The corpus of mutants: every operator applied at every key of every plan, without repetitions if plans agree at a key.

Two plans agree at a key if they give the same style to the same module of models of the same library (`Site.likeness`), and
the later plan's module has no parameter that the earlier plan's module lacks. For example, llama's projections with biases
stand for all projections without biases.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from torch import nn

from tests.support.mutants.architectures import ARCHITECTURES, Architecture
from tests.support.mutants.operators import (
    AT_SHARED_HEADS,
    BACKWARD,
    DROP,
    FORWARD,
    SKIP,
    STREAM_INDEPENDENT,
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
"""The name of the only operator that changes no style: a mixer keeps the attributes that it has in the unsplit model."""


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
        sequence = "sharded" if self.options.sequence_parallel else "replicated"
        return f"{self.architecture.name}, tp {self.options.degrees.tp}, sequence {sequence}: {self.operator} at {self.key}"

    @property
    def effect(self) -> object:
        """Return a value that is equal for mutants that compute the same.

        Mutants compute the same if their styles have no hooks, and give the same layouts to the same key.
        """
        style = self.change
        if not isinstance(style, Style) or type(style).by_weights is not Style.by_weights:
            return self
        module = self.architecture.reference().pristine.get_submodule(self.key)
        over = SplitOver(self.options.degrees.tp, self.options.stream)
        return self.key, self.options, tuple(sorted(style.layouts(module, over).items()))


@cache
def corpus() -> dict[Architecture, list[Mutant]]:
    """Return, for each architecture, the mutants that no earlier architecture has."""
    parameters_of_earlier: dict[tuple, list[set[str]]] = {}
    by_architecture = {}
    for architecture in ARCHITECTURES:
        by_architecture[architecture] = []
        for mutant in list(mutants(architecture)):
            before = parameters_of_earlier.setdefault((mutant.operator, mutant.options, mutant.likeness), [])
            module = architecture.reference().pristine.get_submodule(mutant.key)
            parameters = {name for name, param in module._parameters.items() if param is not None}
            if not any(parameters <= earlier for earlier in before):
                by_architecture[architecture].append(mutant)
            before.append(parameters)
    return by_architecture


def mutants(architecture: Architecture) -> Iterator[Mutant]:
    """Yield all mutants of one plan, with and without sequence parallelism where that makes a difference.

    The mutants are for tp 2. Mutants of key/value heads are yielded again for tp 4, where two ranks share a head.
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
    shares_heads = options.degrees.tp > 2
    for key, style in source.full_plan(model).items():
        block = next((name for name in blocks if key.startswith(f"{name}.")), None)
        if (
            shares_heads
            and not (isinstance(style, KVColwise) and options.degrees.tp > style.heads)
            and not key.endswith("k_norm")
        ):
            continue
        for operator in (*FORWARD, *BACKWARD):
            if block not in (None, blocks[0] if operator in FORWARD else blocks[-1]):
                continue
            if shares_heads and operator not in AT_SHARED_HEADS:
                continue
            if options.sequence_parallel == (operator is shift_half) and _ignores_stream(operator, style):
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


def _ignores_stream(operator: Callable[[Site], Change], style: Style) -> bool:
    """Whether the fault is the same with and without sequence parallelism, so that one case is enough."""
    return (operator in STREAM_INDEPENDENT and style.is_inside_region) or (
        operator is summed_again and isinstance(style, ReplicatedOffStream)
    )


def mutated(base: type[TPPlan], key: str, operator: Callable[[Site], Change]) -> type[TPPlan]:
    """Return `base` with the style of `key` changed by `operator`."""

    class Mutated(base):  # type: ignore[misc, valid-type]
        def full_plan(self, model: nn.Module) -> Plan:
            plan = super().full_plan(model)
            # The key keeps its position in the dict, because among tied weights the first key decides.
            plan[key] = operator(Site(key, plan[key], model, self))
            return {name: style for name, style in plan.items() if style != DROP}

    return Mutated


def forgetful(base: type[TPPlan], mixer: nn.Module) -> type[TPPlan]:
    """Return `base` without local attributes for `mixer`, the first block's."""

    class Forgetful(base):  # type: ignore[misc, valid-type]
        def local_attributes(self, attn: nn.Module) -> dict[str, int]:
            return {} if attn.layer_idx == mixer.layer_idx else super().local_attributes(attn)

        def queries_per_group(self, attn: nn.Module) -> dict[str, int]:
            return {} if attn.layer_idx == mixer.layer_idx else super().queries_per_group(attn)

    return Forgetful
