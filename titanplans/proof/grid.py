"""`verify`: every degree and every choice of options of one plan and one model, in every pair of conditions."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from titanplans.apply.apply import check_plan
from titanplans.errors import PlanError, either
from titanplans.plan.custom import PlanSource, resolve_plan
from titanplans.plan.plan import TPOptions
from titanplans.proof.cases import CONDITIONS, Proof, by_reference
from titanplans.proof.conditions import Batch, Scenario
from titanplans.proof.modes import exact_float8
from titanplans.proof.patches import unpatched
from titanplans.proof.processes import side_by_side
from titanplans.proof.report import CaseResult, Refusal, Report
from titanplans.proof.sample import Inputs, Sampler, randomise
from titanplans.proof.tolerance import check_dtype
from titanplans.proof.training import Loss
from titanplans.proof.world import Worlds, group_degree

DEGREES = (2, 4, 8)
BOTH = (True, False)


def verify(
    model_fn: Callable[[], nn.Module],
    plan: PlanSource = None,
    *,
    degrees: Sequence[int] | None = None,
    loss_parallel: bool | None = None,
    sequence_parallel: bool | None = None,
    sequence_dim: int = 1,
    inputs: Inputs = None,
    seq_len: int = 16,
    batch_size: int = 2,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    losses: Mapping[str, Loss] | None = None,
    ranks: str | None = None,
    conditions: str = "pairs",
    processes: int = 1,
    progress: Callable[[str], None] | None = None,
    watch: Callable[[Report, int], None] | None = None,
) -> Report:
    """Prove that `plan` splits a model right: a training, split and whole, quantity by quantity, in many conditions.

    Compared are the loss and the logits of each micro batch, the gradient of every parameter after each step (a missing
    one fails, and so does one that the whole model does not have), the gradient norm as a trainer computes it, the
    weights after the last AdamW step, the equality of all replicas on all ranks, the logits of an evaluation and of a
    forward with a cache, and that tied weights are still one tensor. Tolerances are derived: see
    titanplans/proof/tolerance.py. The trainings, and which cases are proved, are those of titanplans/proof/conditions.py.
    A case that fails is proved again with fewer conditions, until the report can name those that it needs.

    The model's parameters are given new values first (see titanplans/proof/sample.py), so that initial
    ones, of zeros or ones, can't hide a wrong path; it runs in training mode.

    Args:
        model_fn: makes the model, with real weights, on the CPU (over a process group on the
            device of its rank). Called once.
        plan: as in `apply_plan`; None for the registered one.
        degrees: which to prove; None for those of 2, 4 and 8 that the model allows, or over a
            process group its size, which may be 1: then the split model's code and kernels run, and nothing is split.
        loss_parallel: True or False; None for both.
        sequence_parallel: likewise.
        sequence_dim: the dimension of the hidden states that is the sequence.
        inputs: of the model's forward: a function of batch size, sequence length and seed that returns keyword arguments,
            tensors on any device; or these themselves, which every batch then is; None for token ids.
        seq_len: tokens in a plain sequence; some are longer and some shorter.
        batch_size: sequences in a plain batch; some have one more, some only one.
        dtype: of weights and activations: float64 or float32. A few cases are in fewer bits.
        seed: of weights, tokens and labels.
        losses: further ones, by name, each a function of logits, labels and the number of labels. Ours
            (`titanplans.parallel.cross_entropy`) goes backward through the model; of these the value and the
            gradient at the logits are compared, but over simulated ranks, which they could not tell apart.
        ranks: "threads" or "simulated", all in this process; "process_group": one rank in each process
            of the default one, each of which calls this and gets the same report; None for threads or
            simulated ranks, whichever fits each degree (titanplans/proof/world.py says when).
        conditions: "pairs": cases that cover every pair of them; "each": every one, at the smallest degree; "plain": one
            step of one batch at every choice of options.
        processes: in which the cases are proved, forked if there are several: see titanplans/proof/processes.py.
        progress: called with a few words before each step.
        watch: called after each case with the report so far, the newest case last, and how many cases there are. What a
            wrong case needs to be wrong is looked for when all are proved.

    Raises:
        PlanError: the plan does not fit the model; a degree that was named is refused; no degree
            is accepted; the whole model does not run, or not in this dtype.
        VerifyError: the plan changes code that the whole model runs, too.
    """
    check_dtype(dtype)
    if conditions not in CONDITIONS:
        raise PlanError(f"conditions = {conditions!r}: {either(list(CONDITIONS))}")
    if processes < 1 or (processes > 1 and ranks == "process_group"):
        raise PlanError(
            f"processes = {processes}: 1 or more, and no more than 1 over a process group, each of whose ranks is one"
        )
    progress = progress or (lambda words: None)
    named = degrees is not None or ranks == "process_group"
    if ranks == "process_group":
        degrees = [group_degree(degrees)]
    degrees = DEGREES if degrees is None else tuple(degrees)
    if not degrees or min(degrees) < (1 if ranks == "process_group" else 2):
        raise PlanError(
            f"degrees = {list(degrees)}: nothing is split, so nothing can be proved: name degrees of 2 or more"
        )
    model = model_fn().to(dtype).train()
    if any(param.is_meta for param in model.parameters()):
        raise PlanError(f"{type(model).__name__} has parameters on meta: let model_fn make real ones")
    with exact_float8(model, dtype):
        # A plan is code: what it does to a module must not be done to the one that it is compared with.
        accepted, refused = accepted_cases(
            _without_values(model), plan, degrees, loss_parallel, sequence_parallel, sequence_dim, named=named
        )
        randomise(model, seed)
        if ranks == "process_group":
            _share(model)
        plan_name = type(resolve_plan(plan, model, accepted[0])).__name__
        plain = Scenario(((Batch(size=batch_size, length=seq_len),),), dtype=_name(dtype))
        with Worlds(ranks, model) as worlds:
            sampler = Sampler(model, inputs, sequence_dim, seed)
            proof = Proof(model, plan, sampler, seed, losses, worlds, progress)
            cases, trained = proof.cases(accepted, plain, conditions)
            groups = by_reference(cases)
            results: dict[int, CaseResult] = {}
            report = Report(f"{type(model).__name__}, {plan_name}", _name(dtype), (), tuple(refused), trained)

            def heard(news: tuple[int, CaseResult]) -> None:
                results[news[0]] = news[1]
                if watch is not None:
                    watch(replace(report, cases=tuple(results.values())), len(cases))

            for proved, unreached in side_by_side(
                partial(proof.run, cases, groups, plain), len(groups), processes, heard
            ):
                results |= proved
                proof.unreached += unreached
    proved_all = tuple(results[at] for at in range(len(cases)))
    return replace(report, cases=proved_all, unreached=tuple(dict.fromkeys(proof.unreached)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def accepted_cases(
    model: nn.Module,
    plan: PlanSource,
    degrees: Sequence[int],
    loss_parallel: bool | None,
    sequence_parallel: bool | None,
    sequence_dim: int = 1,
    *,
    named: bool,
) -> tuple[list[TPOptions], list[Refusal]]:
    """Return the cases that strict application accepts, and those that it refuses. Arguments as those of `verify`.

    Args:
        named: the degrees were asked for, so that each must be accepted with some choice of options.

    Raises:
        PlanError: no case is accepted, or none of a degree that was named.
        VerifyError: the plan changes code that the whole model runs, too.
    """
    grid = [
        TPOptions(degree, loss, sequence, sequence_dim)
        for degree, loss, sequence in itertools.product(
            degrees,
            BOTH if loss_parallel is None else (loss_parallel,),
            BOTH if sequence_parallel is None else (sequence_parallel,),
        )
    ]
    accepted, refused = [], []
    errors: list[PlanError] = []
    with unpatched(model):
        for degree, group in itertools.groupby(grid, key=lambda options: options.degree):
            reasons: dict[str, list[TPOptions]] = {}
            for options in group:
                try:
                    check_plan(
                        model,
                        degree,
                        loss_parallel=options.loss_parallel,
                        sequence_parallel=options.sequence_parallel,
                        sequence_dim=options.sequence_dim,
                        plan=plan,
                    )
                    accepted.append(options)
                except PlanError as error:
                    errors.append(error)
                    reasons.setdefault(str(error), []).append(options)
            if named and not any(options.degree == degree for options in accepted):
                raise errors[-1]
            refused += [Refusal(tuple(those), reason) for reason, those in reasons.items()]
    if not accepted:
        raise errors[0]
    return accepted, refused


def _without_values(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on meta."""
    with torch.no_grad():
        values = {
            id(tensor): nn.Parameter(tensor.to("meta"), tensor.requires_grad)
            if isinstance(tensor, nn.Parameter)
            else tensor.to("meta")
            for tensor in itertools.chain(model.parameters(), model.buffers())
        }
    return copy.deepcopy(model, values)


def _share(model: nn.Module) -> None:
    """Give every rank the first one's parameters and buffers: what model_fn drew may differ."""
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
