"""Losses and parameters of the user next to a model under tensor or context parallelism."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import zoo
from tests.support.process_groups import run
from tests.support.tiny_model import Block, Tiny, TinyPlan
from titanplans import PlanError, apply_plan
from titanplans.parallel import cross_entropy
from titanplans.split.gradients import align_gradients


def balance(logits):
    """Return the load-balancing loss of router logits [batch, tokens, experts] of each layer."""
    return sum(of_layer.softmax(-1).flatten(0, -2).mean(0).square().sum() for of_layer in logits) / len(
        logits
    )


class Mixture(nn.Module):
    def __init__(self, width=16, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.up_proj = nn.Parameter(torch.randn(experts, width, 8) / 4)
        self.down_proj = nn.Parameter(torch.randn(experts, 8, width) / 4)
        self.shared_up, self.shared_down = nn.Linear(width, 8, bias=False), nn.Linear(8, width, bias=False)

    def forward(self, x):
        logits = self.gate(x)
        inner = torch.einsum("blh,ehw->blew", x, self.up_proj).relu()
        mixed = torch.einsum("blew,ewh,ble->blh", inner, self.down_proj, logits.softmax(-1))
        return mixed + self.shared_down(self.shared_up(x).relu()), logits


class RoutedBlock(Block):
    def __init__(self):
        super().__init__()
        self.moe_norm, self.moe = self.mlp_norm, Mixture()
        del self.mlp_norm, self.mlp

    def forward(self, x):
        x = x + self.attn(hidden_states=self.attn_norm(x))
        mixed, logits = self.moe(self.moe_norm(x))
        return x + mixed, logits


class Routed(Tiny):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(RoutedBlock() for _ in range(2))

    def forward(self, input_ids):
        x, routed = self.embed(input_ids), []
        for layer in self.layers:
            x, logits = layer(x)
            routed.append(logits)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)), aux_loss=balance(routed))


class Plan(TinyPlan):
    """A plan for three-dimensional experts and a shared expert, in a mixture named `moe`, which the engine does not know."""

    def layer_plan(self, layer):
        on_stream = {name: self.replicated_on_stream() for name in ("attn_norm", "moe_norm")}
        attention = {f"attn.{key}".rstrip("."): style for key, style in self.attn_plan(layer.attn).items()}
        mixture = {
            **self.mlp_region(),
            "gate": self.replicated_in_region(),
            "up_proj": self.colwise(dim=2),
            "down_proj": self.rowwise(reduce_output=False, dim=1),
            "shared_up": self.colwise(),
            "shared_down": self.rowwise(reduce_output=False),
        }
        return on_stream | attention | {f"moe.{key}".rstrip("."): style for key, style in mixture.items()}

    def model_functions(self, model):
        return {"balance": self.count_once}


def load_balancing_loss_by_user(rank, axis):
    torch.manual_seed(0)
    model, ids = Routed().double(), torch.randint(32, (2, 14))
    labels = torch.roll(ids, -1, 1)

    def step():
        model.zero_grad()
        output = model(ids)
        loss = cross_entropy(output.logits, labels, 1) + 50 * output.aux_loss
        loss.backward()
        align_gradients(model.parameters())
        return loss.detach(), {name: param.grad for name, param in model.named_parameters()}

    expected, gradients = step()
    apply_plan(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), plan=Plan)
    loss, split_gradients = step()
    if axis == "cp":
        dist.all_reduce(loss)  # each rank has the loss of its tokens
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for name, grad in gradients.items():
        torch.testing.assert_close(split_gradients[name].full_tensor(), grad, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_load_balancing_loss_added_by_the_user(axis):
    run(partial(load_balancing_loss_by_user, axis=axis), 2)


def parameters_outside(rank, axis):
    """Follow the rule of docs/context.md: a loss of full tensors is divided by cp, and all gradients are summed over cp."""
    torch.manual_seed(0)
    model = zoo.build("llama").double().train()
    width, ids = model.config.hidden_size, torch.randint(64, (2, 10))
    prompt, head = nn.Parameter(torch.randn(2, 4, width).double()), nn.Linear(width, 3).double()
    outside = [prompt, *head.parameters()]

    def step(divisor=1):
        embedded = torch.cat([prompt, model.get_input_embeddings()(ids)], 1)
        output = model(inputs_embeds=embedded, output_hidden_states=True)
        labels = torch.roll(torch.cat([ids[:, :4], ids], 1), -1, 1)
        user_loss = head(output.hidden_states[-1]).square().sum() / divisor
        (cross_entropy(output.logits, labels, 1) + user_loss).backward()

    step()
    expected = [param.grad.clone() for param in outside]
    inner = {name: param.grad.clone() for name, param in model.named_parameters()}
    model.zero_grad()
    head.zero_grad()
    prompt.grad = None
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    apply_plan(model, mesh)
    step(divisor=2 if axis == "cp" else 1)
    align_gradients(model.parameters())
    if axis == "cp":
        for param in outside:
            dist.all_reduce(param.grad, group=mesh["cp"].get_group())
    for param, grad in zip(outside, expected, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=1e-9, atol=1e-11)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), inner[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_a_soft_prompt_and_a_head_of_the_user(axis):
    run(partial(parameters_outside, axis=axis), 2)


def averaged(rank):
    model = zoo.build("llama").train()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    apply_plan(model, mesh, sum_over_cp=False)
    fully_shard(model, mesh=mesh)
    ids = zoo.inputs("llama")["input_ids"]
    with pytest.raises(PlanError, match=r"fully_shard averages .*set_gradient_divide_factor"):
        model(ids)
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    with pytest.raises(PlanError, match=r"called with labels, .*titanplans.parallel.cross_entropy"):
        model(ids, labels=ids)
    cross_entropy(model(ids).logits, torch.roll(ids, -1, 1), 1).backward()
    with pytest.raises(PlanError, match=r"needs a mesh \('cp', 'tp'\), got \('tp', 'cp'\)"):
        apply_plan(zoo.build("llama"), init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "cp")))


def test_averages_over_cp_and_a_mesh_in_another_order_are_refused():
    run(averaged, 2)
