"""A case of a fixture that fails does not affect the other cases."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support import process_groups


def cases(rank):
    def total():
        value = torch.tensor(float(rank))
        dist.all_reduce(value)
        return value.item()

    def fails_on_one_rank():
        if rank == 1:
            raise ValueError("rank 1 fails")
        dist.barrier()

    return {"before": total, "fails": fails_on_one_rank, "after": total}


results = process_groups.case_fixture(cases, 2)


@pytest.mark.parametrize("case", ["before", "after"])
def test_a_case_next_to_a_failing_one_has_its_result(results, case):
    assert results[case] == 1.0


def test_a_failing_case_raises_its_failure(results):
    # Either the error of rank 1 is raised, or an error of rank 0, which has lost the connection.
    with pytest.raises(mp.ProcessRaisedException):
        results["fails"]
