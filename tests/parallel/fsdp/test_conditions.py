"""FSDP modules chosen by conditions, over real process groups; a condition that matches nothing is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.support import process_groups
from tests.support.refusals import refusal_or_none
from titanplans.parallel import FSDP2Config
from titanplans.parallel.fsdp.conditions import shard_model


class Net(nn.Module):
    """A model without decoder: two lists of blocks, no embedding, no head."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.stages = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))) for _ in range(2)
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for stage in self.stages:
            x = x + stage(x)
        return self.last(x)


def in_stages(name, module):
    return name.startswith("stages.") and name.count(".") == 1


def inner(name, module):
    return isinstance(module, nn.Sequential) and name.count(".") == 2


def nothing(name, module):
    return name == "stage.0"


def container(name, module):
    return name == "stages"


def activations(name, module):
    return isinstance(module, nn.GELU)


def tied(name, module):
    return name in ("stages.0.0", "stages.1.1")


ACCEPTED = {
    "stages": [in_stages],
    "inner blocks": [inner],
    "nested": {"stages": in_stages, "inner": inner},
    "nested, by a lambda": [in_stages, lambda name, module: name in ("stages.0.0", "first")],
}
UNITS = {
    "stages": ["the root", "stages.0", "stages.1"],
    "inner blocks": ["the root", *(f"stages.{i}.{j}" for i in range(2) for j in range(2))],
    "nested": [
        "the root", "stages.0", "stages.0.0", "stages.0.1", "stages.1", "stages.1.0", "stages.1.1"
    ],
    "nested, by a lambda": ["the root", "first", "stages.0", "stages.0.0", "stages.1"],
}  # fmt: skip
REFUSED = {
    "condition nothing holds for no module": [in_stages, nothing],
    "condition 2 (<lambda>) holds for no module": [in_stages, lambda name, module: False],
    "condition mine holds for no module": {"mine": nothing},
    "condition activations holds for no module": [activations],
    "condition container holds for stages, a ModuleList": [container],
    "no conditions": [],
    "stages.0.0.0.weight and stages.1.1.0.weight are one parameter": [tied],
}


def build():
    torch.manual_seed(0)
    return Net()


def step(model, x):
    model(x).square().sum().div(64).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def all_cases(rank):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (4,))
    accepted, refused = {}, {}
    for name, conditions in ACCEPTED.items():
        model = build()
        units = shard_model(model, conditions, mesh, FSDP2Config(fsdp_reshard_after_forward="always"))
        step(model, inputs().chunk(4)[rank])
        params = dict(model.named_parameters())
        assert all(isinstance(p, DTensor) for p in params.values())
        accepted[name] = [str(u) for u in units], {k: p.full_tensor() for k, p in params.items()}
    for expected, conditions in REFUSED.items():
        model = build()
        if conditions == [tied]:
            model.stages[0][0][0].weight = model.stages[1][1][0].weight
        error = refusal_or_none(shard_model, model, conditions, mesh)
        refused[expected] = error, not any(isinstance(p, DTensor) for p in model.parameters())
    return accepted, refused


def inputs():
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


results = process_groups.module_fixture(all_cases, 4)


@pytest.mark.parametrize("name", ACCEPTED)
def test_fsdp_modules_and_step(name, results):
    units, weights = results[0][name]
    assert units == UNITS[name]
    model = build()
    step(model, inputs())
    for key, value in model.named_parameters():
        # float32, sums of at most some tens of terms in another order.
        torch.testing.assert_close(weights[key], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("expected", REFUSED)
def test_conditions_are_refused_before_anything_is_sharded(expected, results):
    message, untouched = results[1][expected]
    assert expected in message
    assert "\n" not in message
    assert untouched
