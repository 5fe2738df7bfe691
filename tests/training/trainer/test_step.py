"""A step is skipped on all ranks if a value is not finite on one."""

import torch

from tests.support import process_groups
from titanplans.training.trainer.step import FiniteCheck


def test_all_ranks_agree_on_finite_weights_also_with_an_empty_shard():
    model = torch.nn.ParameterList([torch.ones(2), torch.empty(0)])
    with process_groups.fake_group(2):
        assert FiniteCheck([model], torch.device("cpu")).on_all_ranks()
        with torch.no_grad():
            model[0][1] = torch.nan
        assert not FiniteCheck([model], torch.device("cpu")).on_all_ranks()
