"""Options of model families with which a model can't be split. tests/plans/test_proofs.py proves all other options."""

import pytest
import torch

from titanplans import Degrees, PlanError, check_plan, modeling


def test_raven_is_refused_with_random_numbers_for_each_head():
    with torch.device("meta"):
        model = modeling.build(modeling.load_config("raven", "debug", add_gumbel_noise=True))
    with pytest.raises(PlanError, match=r"add_gumbel_noise = True"):
        check_plan(model, Degrees(tp=2))
    check_plan(model, Degrees(pp=2))  # allowed, because no heads are split without TP


def test_deltaformer_is_refused_with_fewer_heads_of_keys():
    """flash-linear-attention's kernel asserts equal numbers of heads, so the unsplit model fails, too."""
    with torch.device("meta"):
        model = modeling.build(modeling.load_config("deltaformer", "debug", num_kv_heads=2))
    with pytest.raises(PlanError, match=r"num_kv_heads = 2 with num_heads = 8"):
        check_plan(model, Degrees(tp=2))
