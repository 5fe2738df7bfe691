"""Attributes and hooks that a user sets on `module.weight` of a split model reach the parameter."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from tests import zoo
from tests.support.process_groups import run_on_threads
from tests.support.tiny_model import split
from titanplans import PlanError, apply_plan
from titanplans.split.module_weight import LocalWeight

TOKENS = torch.arange(16)[None]


def test_requires_grad_reaches_the_parameter():
    def work(world):
        model = split(world)
        norm, head = model.layers[0].attn_norm, model.lm_head
        norm.weight.requires_grad = False
        head.weight.requires_grad_(False)
        frozen = [p.requires_grad for p in (norm._parameters["weight"], head._parameters["weight"])]
        model(TOKENS).logits.sum().backward()
        without = [module.weight.grad for module in (norm, head)]
        head.weight.requires_grad = True
        with torch.no_grad():
            norm.weight.requires_grad = True
        assert norm.weight.requires_grad
        assert head.weight.requires_grad
        model(TOKENS).logits.sum().backward()
        return frozen, without, [type(module.weight.grad) for module in (norm, head)]

    assert run_on_threads(work) == ([False, False], [None, None], [DTensor, DTensor])


def test_gradient_and_hooks_reach_the_parameter():
    def work(world):
        model, calls = split(world), []
        weight = model.layers[0].attn_norm.weight
        weight.register_hook(lambda grad: calls.append(grad.placements))
        weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter))
        model(TOKENS).logits.sum().backward()
        parameter = model.layers[0].attn_norm._parameters["weight"]
        assert weight.grad is parameter.grad is not None
        weight.grad = None
        assert parameter.grad is None
        return calls[0], calls[1] is parameter

    assert run_on_threads(work) == ((Partial(),), True)


def test_it_computes_as_a_plain_tensor():
    def work(world):
        model = split(world)
        projection = model.layers[0].mlp.gate_proj
        weight = projection.weight
        assert type(weight) is LocalWeight
        assert weight.shape == (12, 16)
        for result in (weight * 2, weight.detach(), weight.data * 2, nn.functional.linear(weight, weight)):
            assert type(result) is torch.Tensor
        with torch.no_grad():
            projection.weight.fill_(2.0)
        return projection._parameters["weight"].full_tensor().unique().tolist()

    assert run_on_threads(work) == [2.0]


def test_new_data_is_refused():
    def work(world):
        split(world).layers[0].mlp.gate_proj.weight.data = torch.zeros(12, 16)

    with pytest.raises(PlanError, match=r"write into it, .*load_state_dict"):
        run_on_threads(work)


@pytest.mark.parametrize(
    "draw",
    [
        lambda weight: nn.init.normal_(weight, std=0.02),
        nn.init.trunc_normal_,
        nn.init.xavier_uniform_,
        nn.init.kaiming_uniform_,
        nn.init.orthogonal_,
        lambda weight: weight.data.normal_(std=0.02),
    ],
)
def test_random_initialization_by_each_rank_is_refused(draw):
    def work(world):
        draw(split(world).layers[0].mlp.gate_proj.weight)

    with pytest.raises(PlanError, match=r"weight\.\w+\(\) on a split model"):
        run_on_threads(work)
    run_on_threads(work, 1)


def test_deterministic_values_are_written():
    def work(world):
        weight = split(world).layers[0].attn.q_norm.weight
        nn.init.ones_(weight)
        weight.data.mul_(3)
        return weight.tolist()

    assert run_on_threads(work) == [3.0] * 4


def test_an_uneven_shard_and_shared_heads():
    def work(world):
        model = zoo.build("llama", intermediate_size=45, num_key_value_heads=2)
        apply_plan(model, world.mesh, loss_parallel=False)
        block = model.model.layers[0]
        projections = block.mlp.up_proj, block.self_attn.k_proj
        for module in projections:
            module.weight.requires_grad = False
            assert not module._parameters["weight"].requires_grad
        return tuple(module.weight.shape[0] for module in projections)

    assert run_on_threads(work, 4) == (12, 16)


def test_a_compiled_function_takes_it():
    def work(world):
        weight = split(world).lm_head.weight
        double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
        return double(weight).equal(weight.detach() * 2)

    assert run_on_threads(work)
