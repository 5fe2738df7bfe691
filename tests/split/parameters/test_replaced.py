"""Optimizers built before the split: `prepare_optimizer` carries them over; otherwise their step is refused.

Training with an optimizer that was carried over is compared in test_manager.py.
"""

import copy
from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import process_groups
from tests.support.refusals import refusal_or_none
from tests.support.tiny_batches import batches, build
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import apply_plan
from titanplans.parallel import DDPConfig, Degrees, FSDP2Config, ParallelManager
from titanplans.parallel.optimizers.muon import Muon
from titanplans.parallel.optimizers.roles import Sections

TP = FSDP2Config(plan=TinyPlan), Degrees(tp=2)


def backward(
    model, loss=lambda logits: (logits.full_tensor() if hasattr(logits, "full_tensor") else logits).sum()
):
    loss(model(batches()[0][0]).logits).backward()


def after_the_split(tied):
    """Return errors of optimizers built before `apply_plan`, and errors of one built after it and of a copy of an early
    one."""
    model = Tiny(tied)
    params = list(model.parameters())
    matrices = [param for param in params if param.ndim == 2]
    early = [torch.optim.AdamW(params), torch.optim.SGD(params, foreach=True), Muon(matrices)]
    copied = copy.deepcopy(early[0])
    apply_plan(model, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), plan=TinyPlan)
    late = torch.optim.AdamW(model.parameters())
    backward(model)
    of_early = [refusal_or_none(optimizer.step) for optimizer in early]
    of_early += [
        refusal_or_none(early[0].zero_grad),
        refusal_or_none(torch.nn.utils.clip_grad_norm_, params, 1.0),
    ]
    return of_early, [
        refusal_or_none(late.step),
        refusal_or_none(late.zero_grad),
        refusal_or_none(copied.step),
    ]


def between_split_and_shard():
    """Return the errors of an optimizer built between `apply_plan` and torch's `fully_shard`, and of one built later."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Tiny()
    apply_plan(model, mesh["tp"], plan=TinyPlan)
    early = torch.optim.AdamW(model.parameters())
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"])
    late = torch.optim.AdamW(model.parameters())
    backward(model)
    return refusal_or_none(early.step), refusal_or_none(late.step)


def by_a_manager(make=torch.optim.AdamW, prepare=True, step=False, strategy=TP, **options):
    """Return the error of `prepare_optimizer`, or else of a step, for an optimizer that was built before `parallelize`."""
    manager = ParallelManager(strategy[0].replace(**options), strategy[1], device_type="cpu")
    model = build()
    optimizer = make(model.parameters(), lr=0.1)
    if step:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    model = manager.parallelize(model)
    return refusal_or_none(manager.prepare_optimizer if prepare else lambda it: it.step(), optimizer)


def muon(early):
    """Return the weights after a step of Muon on packed matrices; it is built before or after `parallelize`."""
    manager, model = ParallelManager(*TP, device_type="cpu"), build()

    def make():
        named = [(n, p) for n, p in model.named_parameters() if n.endswith("_proj.weight")]
        sections = {p: Sections(0, (8, 16)) for n, p in named if "gate_proj" in n}
        return Muon([p for _, p in named], lr=0.1, sections=sections)

    optimizer = make() if early else None
    model = manager.parallelize(model)
    optimizer = manager.prepare_optimizer(optimizer or make())
    manager.cross_entropy(model(batches()[0][0]).logits, batches()[1][0]).backward()
    optimizer.step()
    return {name: param.detach().full_tensor() for name, param in model.named_parameters()}


def all_cases(rank):
    return {
        "split": partial(after_the_split, tied=False),
        "split, tied": partial(after_the_split, tied=True),
        "sharded": between_split_and_shard,
        "fsdp2": partial(by_a_manager, prepare=False, strategy=(FSDP2Config(), Degrees())),
        "tp": partial(by_a_manager, prepare=False),
        "ddp": partial(by_a_manager, prepare=False, strategy=(DDPConfig(), None)),
        "state": partial(by_a_manager, step=True),
        "adagrad": partial(by_a_manager, make=torch.optim.Adagrad),
        "lora": partial(by_a_manager, lora={"rank": 2}),
        "lora, ddp": partial(by_a_manager, lora={"rank": 2}, strategy=(DDPConfig(), None)),
        "no model": lambda: refusal_or_none(
            ParallelManager(*TP, device_type="cpu").prepare_optimizer, torch.optim.SGD(build().parameters())
        ),
        "muon": lambda: (muon(early=True), muon(early=False), dict(build().named_parameters())),
    }


results = process_groups.case_fixture(all_cases, 4)


REPLACED = "was replaced when"


@pytest.mark.parametrize("case", ["split", "split, tied"])
def test_a_step_of_an_optimizer_built_before_the_split_is_refused(case, results):
    early, others = results[case]
    assert len(early) == 5
    for message in early:
        assert message.startswith("parameter '")
        assert REPLACED in message
        assert "prepare_optimizer" in message
    assert others == [None, None, None]


def test_an_optimizer_built_between_the_split_and_fully_shard_is_refused(results):
    early, late = results["sharded"]
    assert REPLACED in early
    assert late is None


def test_an_optimizer_that_was_not_prepared_is_refused(results):
    assert REPLACED in results["fsdp2"]
    assert REPLACED in results["tp"]
    assert results["ddp"] is None


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("state", "AdamW was built before the model was parallelised"),
        ("adagrad", "Adagrad was built before the model was parallelised"),
        ("lora", "AdamW was built before adapters were added"),
        ("lora, ddp", "AdamW was built before adapters were added"),
        ("no model", "call parallelize(model) first"),
    ],
)
def test_prepare_optimizer_refuses_what_it_can_t_carry_over(case, message, results):
    assert message in results[case]


def test_muon_is_carried_over_with_its_packed_matrices(results):
    early, late, begun = results["muon"]
    torch.testing.assert_close(early, late, rtol=0, atol=0)
    assert not early["layers.0.mlp.gate_proj.weight"].equal(begun["layers.0.mlp.gate_proj.weight"])
