"""Collectives on local tensors: called on the process group, or as operators where a mode watches, they give the same."""

import itertools

import torch
import torch.distributed as dist

from tests.support import process_groups
from tests.support.operator_counts import OperatorCounts
from titanplans.split.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    gather,
    reduce_scatter,
    scatter_sum,
    shard_of_rank,
    sum_gradients,
    sum_ranks,
)

RANKS = 3
SHAPES = [(1, 6, 4), (2, 6, 4), (2, 7, 4), (1, 4, 2), (5, 2), (7,)]


def _both(work):
    """Return what `work` returns on the process group and as operators."""
    direct = work()
    with OperatorCounts() as seen:
        by_operators = work()
    namespaces = {name.partition("::")[0] for name in seen.counts}
    assert "_c10d_functional" in namespaces
    assert "c10d" not in namespaces
    return direct, by_operators


def _each(rank):
    group = dist.group.WORLD.group_name, RANKS
    same = []
    for shape in SHAPES:
        torch.manual_seed(0)
        everyones = torch.rand(RANKS, *shape, dtype=torch.float64)
        mine, summed = everyones[rank], everyones.sum(0)
        turned = mine.transpose(0, -1).contiguous().transpose(0, -1)  # the same, another way round in memory
        for dim, x in itertools.product(range(len(shape)), (mine, turned)):
            length = shape[dim]
            shard = shard_of_rank(summed, dim, rank, group)
            scattered = _both(lambda x=x, dim=dim: reduce_scatter(x, dim, group))
            part = shard_of_rank(x, dim, rank, group).requires_grad_()
            own = [shard_of_rank(each, dim, r, group) for r, each in enumerate(everyones)]
            whole = torch.cat(own, dim).narrow(dim, 0, length)
            gathered = _both(lambda part=part, dim=dim, n=length: all_gather(part.detach(), dim, n, group))
            same += [torch.allclose(each, shard) and each.is_contiguous() for each in scattered]
            same += [torch.equal(each, whole) and each.is_contiguous() for each in gathered]
        for operation, of in (("sum", summed), ("max", everyones.amax(0)), ("min", everyones.amin(0))):
            reduced = _both(lambda x=turned, operation=operation: all_reduce(x, group, operation))
            same += [torch.allclose(each, of) for each in reduced]
        assert torch.equal(turned, everyones[rank])  # nobody's input is written to
        sent = everyones[rank].unsqueeze(0).expand(RANKS, *shape)
        same += [torch.equal(each, everyones) for each in _both(lambda sent=sent: all_to_all(sent, group))]
    return {"same": all(same), "gradients": _gradients(rank, group)}


def _gradients(rank, group):
    """Whether gradients of gradients are right, without and with sequence parallelism; nodes where no gradient is needed."""
    torch.manual_seed(0)
    whole = torch.rand(2, 7, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(RANKS, 4, 4, dtype=torch.float64)

    def twice(output):
        (first,) = torch.autograd.grad(output.sum(), whole, create_graph=True)
        return torch.autograd.grad((first**2).sum(), whole)[0]

    expected = twice(sum((whole @ weight) ** 3 for weight in weights))
    plain = twice(sum_ranks((sum_gradients(whole, group) @ weights[rank]) ** 3, group))
    shard = shard_of_rank(whole, 1, rank, group)
    mine = twice(scatter_sum((gather(shard, 1, 7, group) @ weights[rank]) ** 3, 1, group))
    frozen = (
        sum_gradients(whole.detach(), group),
        sum_ranks(whole.detach(), group),
        scatter_sum(whole.detach(), 1, group),
    )
    return (
        [torch.allclose(plain, expected), torch.allclose(all_reduce(mine, group), expected)],
        [x.grad_fn for x in frozen],
    )


found = process_groups.module_fixture(_each, RANKS)


def test_the_process_group_itself_and_operators_give_the_same(found):
    assert found["same"]


def test_a_backward_is_differentiated_again(found):
    assert found["gradients"][0] == [True, True]


def test_what_needs_no_gradient_has_no_node(found):
    assert found["gradients"][1] == [None, None, None]
