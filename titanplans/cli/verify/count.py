"""The communication of a proved model: one case for each choice of options, whose blocks send alike at any degree."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from titanplans.cli.verify.group import Ranks
from titanplans.observe.communication import Communication, count_communication
from titanplans.proof import Report, step
from titanplans.proof.simulate import fake_ranks
from titanplans.tensor_parallel import TPOptions, apply_plan
from titanplans.tensor_parallel.custom import PlanSource
from titanplans.tensor_parallel.decoder import find_decoder

Count = tuple[TPOptions, Communication]


def count(
    model: nn.Module, plan: PlanSource, report: Report, ranks: Ranks, inputs: Mapping[str, Any]
) -> list[Count]:
    """Count what the right cases of `report` send, of each choice of options the one with the smallest degree.

    Args:
        model: the whole one, that has never run.
        plan: as in `verify`.
        report: what came out.
        ranks: where it was proved.
        inputs: keyword arguments of the model's forward.
    """
    if not find_decoder(model, required=False).blocks:
        return []  # without blocks there is no bound to hold it against
    chosen: dict[tuple[bool, bool], TPOptions] = {}
    for case in report.cases:
        if case.passed:
            options = TPOptions(case.degree, case.loss_parallel, case.sequence_parallel)
            chosen.setdefault((case.loss_parallel, case.sequence_parallel), options)
    return [(options, _count(model, plan, options, ranks, inputs)) for options in chosen.values()]


def _count(
    model: nn.Module, plan: PlanSource, options: TPOptions, ranks: Ranks, inputs: Mapping[str, Any]
) -> Communication:
    if ranks.group is None:
        made = fake_ranks(options.degree)
    else:
        made = nullcontext(init_device_mesh(ranks.device.type, (options.degree,), mesh_dim_names=("tp",)))
    with made as mesh:
        split = copy.deepcopy(model)
        applied = apply_plan(
            split,
            mesh,
            plan=plan,
            loss_parallel=options.loss_parallel,
            sequence_parallel=options.sequence_parallel,
        )

        def run() -> None:
            logits = step.forward(split, inputs)
            step.backward(logits, torch.zeros(logits.shape[:-1], dtype=torch.long, device=ranks.device))

        batch, sequence = next(v for v in inputs.values() if isinstance(v, torch.Tensor)).shape[:2]
        return count_communication(split, applied, run, options, batch=batch, sequence=sequence)
