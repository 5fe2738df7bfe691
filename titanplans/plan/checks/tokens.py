"""What context parallelism refuses of a plan: styles that don't declare what of a mixer belongs to heads."""

import inspect

from torch import nn

from titanplans.errors import PlanError
from titanplans.plan.resolve import ResolvedPlan
from titanplans.split.cache import CACHES
from titanplans.split.converted import float8_linears
from titanplans.split.decoder import find_decoder, within
from titanplans.styles.base import Style


def check_tokens(plan: ResolvedPlan) -> None:
    """Refuse what can't be split by tokens of `plan`.

    Raises:
        PlanError: a model without blocks; a foreign style that would have to be exchanged; float8.
    """
    if linears := float8_linears(plan.model):
        raise PlanError(
            f"context_parallel_degree = {plan.source.options.degrees.cp}: {next(iter(linears))} is float8, whose scales are "
            "those of all tokens, and a rank has its own: remove float8, or set context_parallel_degree = 1"
        )
    find_decoder(plan.model)  # or it has no blocks
    for entry in plan.entries:
        is_mlp = entry.style.opens and not entry.style.mixes_tokens
        if is_mlp and (told := _tells_tokens(entry.module)):
            raise PlanError(
                f"its forward takes {told}, as code does that mixes tokens, and it is planned as an MLP, to which context "
                "parallelism gives this rank's tokens alone: give it attn_region() or attn_input()",
                key=entry.key,
                style=entry.style,
                module=entry.module,
            )
    for key, style in plan.styles.items():
        if not isinstance(style, Style) and (
            plan.source.options.keeps_weights or any(within(key, r) for r in plan.token_regions)
        ):
            raise PlanError(
                "context parallelism cuts what a plan declares, and this style installs its own hooks: give the module a "
                "style of titanplans, such as colwise()",
                key=key,
                style=style,
                module=plan.module_at(key),
            )


def _tells_tokens(module: nn.Module) -> str | None:
    """Return the argument of the forward of `module` that says which tokens belong together, if it has one."""
    parameters = inspect.signature(module.forward).parameters
    return next(
        (name for name in ("attention_mask", "cu_seqlens", "state", *CACHES) if name in parameters), None
    )
