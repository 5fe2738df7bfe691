"""`split_norm()`: a root-mean-square norm over a width that is split over the ranks, such as one norm over all heads."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

from titanplans.split.collectives import Group
from titanplans.split.costs import Call, ExpectedCollective, cost_of_gather, cost_of_sum
from titanplans.split.layout import Layout, Rows, SharedHeads, rows_of
from titanplans.split.module_weight import add_deferred_bias
from titanplans.split.root_mean_square import EPSILONS, root_ratio
from titanplans.styles.base import Site, SplitOver, Style

Statistic = Callable[..., torch.Tensor]
"""Takes the arguments of the norm's forward, and returns the tensor whose mean square the norm computes."""


class SplitNorm(Style):
    """Split the width of a root-mean-square norm; one number per token, its mean square, is averaged over the ranks.

        forward   y_BLf = norm(x_BLf) * rms(x_BLf) / rms(x_BLF): all-reduce of the mean square [B, L, 1]
        backward  all-reduce of its gradient [B, L, 1]; dw_f is sharded as w

    The module normalises its slice by the slice's RMS, and its output is then scaled by slice RMS / full RMS. So the
    module's code and kernels are unchanged; the module may scale by weight or by 1 + weight, and may gate after the norm.
    A bias is added after the scaling. Under context parallelism the same hook averages over all tp x cp ranks, since the
    width of a mixer is split over all of them.

    Args:
        heads: number of heads in the width, if ranks may share heads; None: equal shards.
        rows: with `heads`, the full width, i.e. the length of the weight.
        statistic: returns the tensor whose mean square is computed, if it is not the first argument, as with a gate before
            the norm.
        groups: number of groups of the width, each with its own mean square; neighbouring ranks share a group if there are
            fewer groups than ranks.
    """

    is_inside_region = needs_equal_shards = True
    listed_as = "norm over the width"

    def __init__(
        self, *, heads: int | None = None, rows: int = 0, statistic: Statistic | None = None, groups: int = 1
    ):
        self.heads, self.rows, self.statistic, self.groups = heads, rows, statistic, groups

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        return {"groups of its width": (self.groups, True)}

    def layout(self, name: str, param: nn.Parameter, over: SplitOver) -> Layout | None:
        if (rows := self._shared_rows(over.degree)) is not None:
            return Layout(Replicate(), Partial(), deferred=name == "bias", rows=rows)
        return Layout(Shard(0), Shard(0), deferred=name == "bias")

    def _shared_rows(self, degree: int) -> Rows | None:
        """Return the rows of the weight that each rank uses if ranks share heads; None if the shards are even."""
        if self.heads is None or self.heads >= degree:
            return None
        return rows_of(0, [SharedHeads(self.rows, self.heads)], degree)

    def refusal(self, module: nn.Module, over: SplitOver) -> str | None:
        if not any(hasattr(module, name) for name in EPSILONS):
            return (
                f"it has none of the attributes {', '.join(EPSILONS)}, so its epsilon is unknown: give it one of them, or "
                "use gathered_in_region()"
            )
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            return "it subtracts a mean, too: use gathered_in_region()"
        return None

    def by_weights(self, module: nn.Module, site: Site) -> None:
        rank, degree = site.ranks.rank, site.ranks.degree
        if isinstance(module, nn.RMSNorm):
            (width,) = module.normalized_shape
            rows = self._shared_rows(degree)
            shard = width // degree if rows is None else sum(run.size for run in rows.runs)
            module.normalized_shape = (shard,)
        ranks_per_group = max(1, degree // self.groups)
        first = rank // ranks_per_group * ranks_per_group
        members = tuple(site.ranks.order[first : first + ranks_per_group])
        module.register_forward_hook(partial(self._correct, site.ranks.group, members), with_kwargs=True)

    def sends(self, module: nn.Module, call: Call) -> tuple[ExpectedCollective, ...]:
        ranks_per_group = max(1, call.degree // self.groups)
        if ranks_per_group == 1:
            return ()
        if ranks_per_group == call.degree:
            return (cost_of_sum(call.tokens),)
        return (cost_of_gather(call.tokens * call.degree),)

    def _correct(
        self, group: Group, members: tuple[int, ...], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        if len(members) > 1:
            x = args[0] if self.statistic is None else self.statistic(*args, **kwargs)
            epsilon = next(getattr(module, name) for name in EPSILONS if hasattr(module, name))
            if epsilon is None:  # torch's RMSNorm then uses the epsilon of the input's dtype
                epsilon = torch.finfo(x.dtype).eps
            output = (output * root_ratio(x, epsilon, group, members)).to(output.dtype)
        return add_deferred_bias(module, output)
