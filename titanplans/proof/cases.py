"""The cases of one model and one plan, and their proof in groups that share a reference. Start at `Proof`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from torch import nn

from titanplans.plan.custom import PlanSource
from titanplans.plan.options import TPOptions
from titanplans.plan.plan import Plan
from titanplans.proof.batches.conditions import Scenario
from titanplans.proof.batches.cover import STEPS, cover, trainings
from titanplans.proof.batches.sample import Sampler, longest_block
from titanplans.proof.case import prove_case
from titanplans.proof.compare.forward import Loss
from titanplans.proof.compare.reference import ReferenceRun
from titanplans.proof.compare.refused import leave_out_what_is_refused, why_not_fused
from titanplans.proof.compare.tolerance import DRAWS, MORE_DRAWS
from titanplans.proof.explain.blame import Blame
from titanplans.proof.ranks.world import World, Worlds
from titanplans.proof.result import CaseResult, case_name
from titanplans.split.converted import float8_linears
from titanplans.split.decoder import find_decoder
from titanplans.split.layout import next_multiple

CONDITIONS = ("pairs", "each", "plain")

Case = tuple[TPOptions, Scenario]

_FURTHER_DTYPES = ("float32", "bfloat16")
"""A few cases are proved in these dtypes, too."""

_LONGEST = 640
"""The largest number of tokens in a "block" sequence, since the cost of attention is quadratic in it."""


class Proof:
    """Chooses and proves the cases of one model and one plan.

    Args:
        model: the unsplit model.
        plan: as in `verify`.
        sampler: makes the batches.
        seed: as in `verify`.
        losses: as in `verify`.
        worlds: the ranks.
        progress: as in `verify`.
    """

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
        """The largest number of ranks, tp x cp, of any case."""
        self.uncovered = list(sampler.uncovered)
        """Conditions and quantities that no case covers, in words."""

    def cases(
        self, styles: Mapping[TPOptions, Plan], plain: Scenario, conditions: str
    ) -> tuple[list[Case], tuple[Scenario, ...]]:
        """Return the cases that cover the model's conditions as `conditions` asks (see `verify`), and their trainings.

        `styles` has the plan's styles for all options that the plan's checks accept.
        """
        accepted = [*styles]
        self.ranks = max(options.degrees.tp_cp for options in accepted)
        if conditions == "plain":
            self.uncovered = [
                "any condition: conditions = 'plain' asks for one plain step",
                *self._missing_modalities([plain]),
            ]
            return [(options, _fitting(plain, options)) for options in accepted], (plain,)
        dtypes = [plain.dtype, *(name for name in _FURTHER_DTYPES if name != plain.dtype)]
        if float8_linears(self.model):
            self.uncovered.append(f"{' and '.join(dtypes[1:])}: float8 is proved in {plain.dtype} only")
            del dtypes[1:]
        has_blocks = bool(find_decoder(self.model, required=False).blocks)
        if not has_blocks:
            self.uncovered.append("recomputed blocks: no list of blocks was found")
        self.uncovered += leave_out_what_is_refused(self.model, self.sampler)
        if (fusion_refusal := why_not_fused(self.model, self.sampler, styles[accepted[0]])) is not None:
            self.uncovered.append(f"a loss that the head computes: {fusion_refusal}")
        if self.sampler.fixed:
            steps = (plain.steps[0] * 2,) * STEPS[0]
            trained = shared = (replace(plain, steps=steps, evaluated=plain.steps[0], cached=True),)
        else:
            batch, block = plain.steps[0][0], self._block()
            trained = trainings(batch, block)
            shared = trainings(batch, block, math.lcm(*(options.shards for options in accepted)))
        if quick := conditions == "each":
            self.uncovered.append(
                "pairs of conditions, other degrees and dtypes: conditions = 'each' asks for each condition once"
            )
            trained, shared, dtypes = trained[:1], shared[:1], dtypes[:1]
        all_trainings = tuple(dict.fromkeys((*trained, *shared)))
        self.uncovered += self._missing_modalities(all_trainings)
        fuse = fusion_refusal is None
        cases = cover(accepted, trained, shared, dtypes, recompute=has_blocks, fuse=fuse, quick=quick)
        return cases, all_trainings

    def _missing_modalities(self, trained: Sequence[Scenario]) -> Iterator[str]:
        return self.sampler.missing_modalities(
            [batch for one in trained for step in one.steps for batch in step]
        )

    def _block(self) -> int:
        block = longest_block(self.model)
        if block > _LONGEST:
            self.uncovered.append(
                f"more than {_LONGEST} tokens: a window or a chunk has {block:,}, so every sequence "
                "of this proof fits into one window or chunk"
            )
        return min(block, _LONGEST)

    def run(
        self,
        cases: Sequence[Case],
        groups: Sequence[Sequence[int]],
        plain: Scenario,
        group_indices: Iterator[int],
        on_result: Callable[[tuple[int, CaseResult]], None],
    ) -> tuple[dict[int, CaseResult], list[str]]:
        """Prove groups of cases, and explain the failing ones once all are proved.

        Args:
            cases: all cases of the proof.
            groups: indices of the cases that share a reference, from `by_reference`.
            plain: the scenario without conditions.
            group_indices: indices of the groups to prove.
            on_result: is called with the index and the result of each case.

        Returns:
            The results by the cases' indices, and the limits of these proofs in words.
        """
        uncovered: list[str] = []
        results: dict[int, CaseResult] = {}
        for members in map(groups.__getitem__, group_indices):
            unsplit = cases[members[0]][1].unsplit
            self.progress("the unsplit model")
            reference = self._reference(unsplit, further=unsplit.dtype != plain.dtype)
            for index in members:
                results[index] = self._prove(reference, *cases[index])
                on_result((index, results[index]))
            # Only now, since any case of the group may have needed more perturbed runs.
            if reference.draws > DRAWS:
                uncovered.append(
                    f"{unsplit.dtype}, some trainings: differences below those of {reference.draws} perturbed runs of the "
                    f"unsplit model: a few runs differ much more than others, so the usual {DRAWS} runs were not enough"
                )
        # Keep two references: of the plain scenario, and the newest one, since an explanation is tried on the next failing
        # case.
        recorded = lru_cache(2)(lambda unsplit: self._reference(unsplit, recording=True, further=True))
        blame = Blame(
            lambda options, scenario: self._prove(recorded(scenario.unsplit), options, scenario), plain
        )
        explained = {
            index: result if result.passed else blame.explain(result)
            for index, result in sorted(results.items())
        }
        return explained, uncovered

    def _reference(self, scenario: Scenario, **settings: bool) -> ReferenceRun:
        return ReferenceRun(
            self.model, scenario, self.sampler, self.seed, self.losses, ranks=self.ranks, **settings
        )

    def _prove(self, reference: ReferenceRun, options: TPOptions, scenario: Scenario) -> CaseResult:
        def prove(world: World) -> CaseResult:
            if world.is_first:
                self.progress(case_name(options))
            return prove_case(reference, self.plan, options, scenario, world)

        result = self.worlds.run(options.degrees.tp_cp, prove)
        for draws in (DRAWS,) if reference.tolerance.exact else (DRAWS, MORE_DRAWS):
            if result.beyond_tolerance and reference.draws < draws:
                self.progress("more perturbed runs of the unsplit model")
                reference.draw(draws)
                result = self.worlds.run(options.degrees.tp_cp, prove)
        # The notes of a passing case name code that calls dist.get_rank(). Such code may act differently in the other
        # replica.
        if result.passed and result.notes:
            result = self.worlds.run(options.degrees.tp_cp, prove, replica=0)
        return result


def _fitting(plain: Scenario, options: TPOptions) -> Scenario:
    """Return `plain` with its length rounded up to a multiple of the ranks that a sequence is sharded over."""
    ((batch,),) = plain.steps
    return replace(plain, steps=((replace(batch, length=next_multiple(batch.length, options.shards)),),))


def by_reference(cases: Sequence[Case]) -> list[list[int]]:
    """Group the indices of the cases that share a reference. The group whose cases have the most ranks in total comes
    first."""
    groups: dict[Scenario, list[int]] = {}
    for index, (_, scenario) in enumerate(cases):
        groups.setdefault(scenario.unsplit, []).append(index)
    return sorted(groups.values(), key=lambda group: -sum(cases[index][0].degrees.tp_cp for index in group))
