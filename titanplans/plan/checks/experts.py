"""What expert parallelism refuses of a plan: no experts, or numbers that do not go together."""

from titanplans.errors import PlanError, either
from titanplans.plan.resolve import ResolvedPlan
from titanplans.plan.styles.base import held
from titanplans.plan.styles.experts import ByExpert


def check_experts(plan: ResolvedPlan) -> None:
    """Refuse a degree of expert parallelism that does not suit the experts of the model, or the other degrees.

    Raises:
        PlanError: so it is.
    """
    options = plan.source.options
    if options.degrees.ep == 1:
        return
    words = f"expert_parallel_degree = {options.degrees.ep}"
    found = [entry for entry in plan.entries if isinstance(entry.style, ByExpert)]
    if not found:
        raise PlanError(
            f"{words}: {type(plan.source).__name__} gives no experts of {type(plan.model).__name__} to ranks; set it to 1"
        )
    if options.degrees.ep % options.degree:
        raise PlanError(
            f"{words} is no multiple of tensor_parallel_degree = {options.degree}, whose ranks have the same tokens: set it "
            f"to {options.degree}, or tensor_parallel_degree to {either(_divisors(options.degrees.ep))}"
        )
    for entry in found:
        number = len(next(iter(held(entry.module).values())))
        if number % options.degrees.ep:
            works = [d for d in _divisors(number) if d % options.degree == 0]
            both = f"set both it and tensor_parallel_degree to {either(_divisors(number))}"
            remedy = f"{either(works)} would work" if works else both
            raise PlanError(
                f"{words} does not divide the number of experts = {number} ({entry.key}, {type(entry.module).__name__}): "
                f"{remedy}"
            )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
