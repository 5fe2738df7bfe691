"""Collectives on local tensors: called on the process group, or as operators under a dispatch mode, with equal results."""

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
    """Return the results of `work`, with calls of the process group and with operators."""
    direct = work()
    with OperatorCounts() as operators:
        by_operators = work()
    namespaces = {name.partition("::")[0] for name in operators.counts}
    assert "_c10d_functional" in namespaces
    assert "c10d" not in namespaces
    return direct, by_operators


def _compare(rank):
    group = dist.group.WORLD.group_name, RANKS
    same = []
    for shape in SHAPES:
        torch.manual_seed(0)
        everyones = torch.rand(RANKS, *shape, dtype=torch.float64)
        mine, summed = everyones[rank], everyones.sum(0)
        # the same values in another memory order
        turned = mine.transpose(0, -1).contiguous().transpose(0, -1)
        for dim, x in itertools.product(range(len(shape)), (mine, turned)):
            length = shape[dim]
            shard = shard_of_rank(summed, dim, rank, group)
            scattered = _both(lambda x=x, dim=dim: reduce_scatter(x, dim, group))
            local = shard_of_rank(x, dim, rank, group).requires_grad_()
            shards = [shard_of_rank(each, dim, r, group) for r, each in enumerate(everyones)]
            full = torch.cat(shards, dim).narrow(dim, 0, length)
            gathered = _both(lambda local=local, dim=dim, n=length: all_gather(local.detach(), dim, n, group))
            same += [torch.allclose(each, shard) and each.is_contiguous() for each in scattered]
            same += [torch.equal(each, full) and each.is_contiguous() for each in gathered]
        for operation, expected in (("sum", summed), ("max", everyones.amax(0)), ("min", everyones.amin(0))):
            reduced = _both(lambda x=turned, operation=operation: all_reduce(x, group, operation))
            same += [torch.allclose(each, expected) for each in reduced]
        assert torch.equal(turned, everyones[rank])  # the input is unchanged
        sent = everyones[rank].unsqueeze(0).expand(RANKS, *shape)
        same += [torch.equal(each, everyones) for each in _both(lambda sent=sent: all_to_all(sent, group))]
    return {"same": all(same), "gradients": _gradients(rank, group)}


def _gradients(rank, group):
    """Return whether second derivatives are right, and the grad_fns of results that need no gradient."""
    torch.manual_seed(0)
    full = torch.rand(2, 7, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(RANKS, 4, 4, dtype=torch.float64)

    def twice(output):
        (first,) = torch.autograd.grad(output.sum(), full, create_graph=True)
        return torch.autograd.grad((first**2).sum(), full)[0]

    expected = twice(sum((full @ weight) ** 3 for weight in weights))
    plain = twice(sum_ranks((sum_gradients(full, group) @ weights[rank]) ** 3, group))
    shard = shard_of_rank(full, 1, rank, group)
    mine = twice(scatter_sum((gather(shard, 1, 7, group) @ weights[rank]) ** 3, 1, group))
    frozen = (
        sum_gradients(full.detach(), group),
        sum_ranks(full.detach(), group),
        scatter_sum(full.detach(), 1, group),
    )
    return (
        [torch.allclose(plain, expected), torch.allclose(all_reduce(mine, group), expected)],
        [x.grad_fn for x in frozen],
    )


results = process_groups.module_fixture(_compare, RANKS)


def test_process_group_and_operators_give_the_same(results):
    assert results["same"]


def test_second_derivatives_are_right(results):
    assert results["gradients"][0] == [True, True]


def test_results_without_gradient_have_no_node(results):
    assert results["gradients"][1] == [None, None, None]
