"""The cases of one model and one plan: chosen, and proved in groups that share a reference."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from torch import nn

from titanplans.plan.custom import PlanSource
from titanplans.plan.options import TPOptions
from titanplans.proof.batches.conditions import Scenario
from titanplans.proof.batches.cover import STEPS, cover, trainings
from titanplans.proof.batches.sample import Sampler, longest_block
from titanplans.proof.case import prove_case
from titanplans.proof.compare.forward import Loss
from titanplans.proof.compare.reference import ReferenceRun
from titanplans.proof.compare.refused import leave_out_what_is_refused, not_fused
from titanplans.proof.compare.tolerance import DRAWS, MORE_DRAWS
from titanplans.proof.explain.blame import Blame
from titanplans.proof.ranks.world import World, Worlds
from titanplans.proof.result import CaseResult, case_name
from titanplans.split.converted import float8_linears
from titanplans.split.decoder import find_decoder
from titanplans.split.layout import next_multiple

CONDITIONS = ("pairs", "each", "plain")

Case = tuple[TPOptions, Scenario]

_FURTHER = ("float32", "bfloat16")
"""Further dtypes, of a few cases."""

_LONGEST = 640
"""Tokens of a block at most, since attention is quadratic in them."""


class Proof:
    """Proves cases of one model and one plan. Arguments as in `verify`; `model` is the whole one."""

    def __init__(
        self,
        model: nn.Module,
        plan: PlanSource,
        sampler: Sampler,
        seed: int,
        losses: Mapping[str, Loss] | None,
        worlds: Worlds,
        progress: Callable[[str], None],
    ):
        self.model, self.plan, self.sampler, self.seed = model, plan, sampler, seed
        self.losses, self.worlds, self.progress = losses, worlds, progress
        self.ranks = 1
        """The most that a case splits layers over."""
        self.unreached = list(sampler.unreached)
        """Conditions and quantities that no case shows, in words."""

    def cases(
        self, accepted: Sequence[TPOptions], plain: Scenario, conditions: str
    ) -> tuple[list[Case], tuple[Scenario, ...]]:
        """Return the cases that cover the `conditions` of this model, and their trainings."""
        self.ranks = max(options.degrees.tp_cp for options in accepted)
        if conditions == "plain":
            self.unreached = ["any condition: one plain step was asked for", *self._text_alone([plain])]
            return [(options, _fitting(plain, options)) for options in accepted], (plain,)
        dtypes = [plain.dtype, *(name for name in _FURTHER if name != plain.dtype)]
        if float8_linears(self.model):
            self.unreached.append(f"{' and '.join(dtypes[1:])}: float8 is proved in {plain.dtype} only")
            del dtypes[1:]
        blocks = bool(find_decoder(self.model, required=False).blocks)
        if not blocks:
            self.unreached.append("recomputed blocks: no list of blocks was found")
        self.unreached += leave_out_what_is_refused(self.model, self.sampler)
        if (unfused := not_fused(self.model, self.sampler)) is not None:
            self.unreached.append(f"a loss that the head computes: {unfused}")
        if self.sampler.fixed:
            steps = (plain.steps[0] * 2,) * STEPS[0]
            trained = shared = (replace(plain, steps=steps, evaluated=plain.steps[0], cached=True),)
        else:
            batch, block = plain.steps[0][0], self._block()
            trained = trainings(batch, block)
            shared = trainings(batch, block, math.lcm(*(options.shards for options in accepted)))
        if quick := conditions == "each":
            self.unreached.append(
                "pairs of conditions, other degrees and dtypes: each condition once was asked for"
            )
            trained, shared, dtypes = trained[:1], shared[:1], dtypes[:1]
        every = tuple(dict.fromkeys((*trained, *shared)))
        self.unreached += self._text_alone(every)
        cases = cover(accepted, trained, shared, dtypes, recompute=blocks, fuse=unfused is None, quick=quick)
        return cases, every

    def _text_alone(self, trained: Sequence[Scenario]) -> Iterator[str]:
        return self.sampler.text_alone([batch for one in trained for step in one.steps for batch in step])

    def _block(self) -> int:
        block = longest_block(self.model)
        if block > _LONGEST:
            self.unreached.append(
                f"more than {_LONGEST} tokens: a window or a chunk has {block:,}, so every sequence lies in one"
            )
        return min(block, _LONGEST)

    def run(
        self,
        cases: Sequence[Case],
        groups: Sequence[Sequence[int]],
        plain: Scenario,
        turns: Iterator[int],
        tell: Callable[[tuple[int, CaseResult]], None],
    ) -> tuple[dict[int, CaseResult], list[str]]:
        """Prove the `groups` whose numbers come in `turns`, `tell` each case, and explain the failing ones.

        Returns:
            The results by the cases' numbers, and their limits in words.
        """
        unreached: list[str] = []
        results: dict[int, CaseResult] = {}
        for members in map(groups.__getitem__, turns):
            whole = cases[members[0]][1].whole
            self.progress("the whole model")
            reference = self._reference(whole, further=whole.dtype != plain.dtype)
            for at in members:
                results[at] = self._prove(reference, *cases[at])
                tell((at, results[at]))
            # After all cases of the group: a failing one may have drawn more perturbed runs.
            if reference.draws > DRAWS:
                unreached.append(
                    f"{whole.dtype}, some trainings: differences below those of {reference.draws} perturbed runs of the "
                    f"whole model: a few jump, so that {DRAWS} perturbed runs told too little"
                )
        # Two: the plain scenario's and the newest, since one explanation is tried on the next failing case.
        recorded = lru_cache(2)(lambda whole: self._reference(whole, recording=True, further=True))
        blame = Blame(
            lambda options, scenario: self._prove(recorded(scenario.whole), options, scenario), plain
        )
        explained = {at: one if one.passed else blame.explain(one) for at, one in sorted(results.items())}
        return explained, unreached

    def _reference(self, scenario: Scenario, **settings: bool) -> ReferenceRun:
        return ReferenceRun(
            self.model, scenario, self.sampler, self.seed, self.losses, ranks=self.ranks, **settings
        )

    def _prove(self, reference: ReferenceRun, options: TPOptions, scenario: Scenario) -> CaseResult:
        def prove(world: World) -> CaseResult:
            if world.first:
                self.progress(case_name(options))
            return prove_case(reference, self.plan, options, scenario, world)

        result = self.worlds.run(options.degrees.tp_cp, prove)
        for number in (DRAWS,) if reference.tolerance.exact else (DRAWS, MORE_DRAWS):
            if result.beyond_tolerance and reference.draws < number:
                self.progress("more perturbed runs of the whole model")
                reference.draw(number)
                result = self.worlds.run(options.degrees.tp_cp, prove)
        # A plan that calls dist.get_rank() may act differently in the other replica.
        if result.passed and result.notes:
            result = self.worlds.run(options.degrees.tp_cp, prove, replica=0)
        return result


def _fitting(plain: Scenario, options: TPOptions) -> Scenario:
    """Return `plain` with sequences whose length the ranks that share one divide."""
    ((batch,),) = plain.steps
    return replace(plain, steps=((replace(batch, length=next_multiple(batch.length, options.shards)),),))


def by_reference(cases: Sequence[Case]) -> list[list[int]]:
    """Return the numbers of the cases that share a reference, group by group, the costliest group first."""
    groups: dict[Scenario, list[int]] = {}
    for at, (_, scenario) in enumerate(cases):
        groups.setdefault(scenario.whole, []).append(at)
    return sorted(groups.values(), key=lambda group: -sum(cases[at][0].degrees.tp_cp for at in group))
