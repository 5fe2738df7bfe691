"""Muon updates full matrices as torch's Muon does, and its updates on four ranks equal one process's, for any sharding.

In float64, gradients of sharded sums differ by rounding. Muon rounds to bfloat16 before it orthogonalises, which removes
this difference or amplifies it, so weights agree to the last digits or not at all.
"""

import pytest
import torch

from tests import zoo
from tests.support import process_groups
from titanplans.config.sections.optimization import Optimizer
from titanplans.errors import ParallelError
from titanplans.parallel import DDPConfig, Degrees, FSDP2Config, Mesh, clip_gradients, parallelize
from titanplans.parallel.optimizers.build import build_optimizers
from titanplans.parallel.optimizers.muon import Muon
from titanplans.parallel.optimizers.muon.exchange import rounds_of
from titanplans.parallel.optimizers.muon.orthogonal import orthogonalize
from titanplans.parallel.optimizers.roles import Sections
from titanplans.proof.compare.forward import call

CASES = {
    "tp 2 x fsdp 2, an uneven width": ("qwen3", dict(intermediate_size=49), dict(tp=2, dp_shard=2)),
    "tp 4, packed weights, shared heads": ("phi3", {}, dict(tp=4, dp_shard=1)),
    "tp 2 x fsdp 2, packed weights of an uneven width": ("phi3", dict(intermediate_size=49), dict(tp=2, dp_shard=2)),
    "fsdp 4, packed weights": ("phi3", {}, dict(dp_shard=4)),
    "tp 4, shared heads": ("llama", dict(num_key_value_heads=2), dict(tp=4, dp_shard=1)),
    "experts, tp 2 x fsdp 2": ("mixtral", dict(num_local_experts=3), dict(tp=2, dp_shard=2)),
    "experts, fsdp 4": ("mixtral", dict(num_local_experts=3), dict(dp_shard=4)),
    "copies of shards, convolutions": ("gla", {}, dict(dp_replicate=2, dp_shard=2)),
    "copies of split layers": ("gla", dict(num_kv_heads=4), dict(dp_replicate=2, dp_shard=1, tp=2)),
    "ddp": ("qwen3", {}, dict(dp_replicate=4, dp_shard=1)),
}  # fmt: skip
OPTIONS = Optimizer(name="Muon", lr=0.02, implementation="for-loop")


def build(name: str, sizes: dict):
    model = zoo.build(name, **sizes)
    model.set_experts_implementation("eager")  # grouped products do not support float64
    return model


def trained(model, name: str, index: int = 0, chunks: int = 1) -> dict[str, torch.Tensor]:
    """Return the weights of `model` after three steps on chunk `index` of each batch, divided into `chunks`."""
    optimizers = build_optimizers(model, OPTIONS)
    for step in range(3):
        batch = zoo.inputs(name, batch_size=4, seq_len=8, seed=step)
        tokens = batch["input_ids"].chunk(chunks)[index]
        logits = call(model, {"input_ids": tokens}).logits
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum")
        (loss / batch["input_ids"].numel()).backward()
        clip_gradients(list(model.parameters()), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {n: w.full_tensor() if hasattr(w, "full_tensor") else w for n, w in weights.items()}


def on_four_ranks(rank: int) -> dict:
    errors, unsharded = {}, {}
    for case, (name, sizes, degrees) in CASES.items():
        key = name, *sizes
        if key not in unsharded and rank == 0:
            unsharded[key] = trained(build(name, sizes), name)
        model, mesh = build(name, sizes), Mesh(Degrees(**degrees), "cpu")
        ddp = case == "ddp"
        parallelize(model, parallel_dims=mesh, config=DDPConfig() if ddp else FSDP2Config())
        tp = degrees.get("tp", 1)
        weights = trained(model, name, rank // tp, 4 // tp)
        if rank == 0:
            begun = build(name, sizes).state_dict()
            errors[case] = {
                n: ((weights[n] - w).abs().max().item(), (begun[n] - w).abs().max().item())
                for n, w in unsharded[key].items()
            }
    return errors


four = process_groups.module_fixture(on_four_ranks, 4)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_sharded_matrices_are_updated_as_full_ones(four, case):
    for name, (error, way) in four[case].items():
        assert way > 1e-3, f"{name} did not move"
        assert error < 1e-10, name


def step(*matrices: torch.Tensor, cls=Muon, **settings) -> list[torch.Tensor]:
    """Return the matrices after two steps with random gradients."""
    params = [torch.nn.Parameter(matrix.clone()) for matrix in matrices]
    optimizer = cls(params, lr=0.1, **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator, dtype=param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(nesterov=False, momentum=0.5),
        dict(ns_steps=3, weight_decay=0.5),
        dict(adjust_lr_fn="original"),
    ],
)
def test_a_step_equals_that_of_torch(settings):
    settings = {"adjust_lr_fn": "match_rms_adamw"} | settings
    start = [torch.randn(24, 16), torch.randn(16, 40)]
    for ours, theirs in zip(
        step(*start, **settings), step(*start, cls=torch.optim.Muon, **settings), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_matrix_becomes_orthogonal():
    values = torch.linalg.svdvals(orthogonalize(torch.randn(3, 32, 64), 5).float())
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert not orthogonalize(torch.zeros(4, 8), 5).any()


def test_each_matrix_of_a_stack_and_of_a_packed_weight_is_updated_by_itself():
    torch.manual_seed(0)
    grads = torch.randn(3, 6, 8)
    for stack, dim, sections in (
        (grads, 0, None),
        (torch.cat(list(grads)), 0, Sections(0, (6, 6, 6))),
        (torch.cat(list(grads), 1), 1, Sections(1, (8, 8, 8))),
        (torch.stack([torch.cat(list(grads)), torch.cat(list(grads))]), 1, Sections(1, (6, 6, 6))),
    ):
        param = torch.nn.Parameter(torch.zeros_like(stack))
        optimizer = Muon(
            [param], adjust_lr_fn="original", sections={} if sections is None else {param: sections}
        )
        param.grad = stack.clone()
        optimizer.step()
        matrices = param.detach().chunk(3, dim) if sections else param.detach()
        for section, grad in zip(matrices, grads, strict=True):
            alone = torch.nn.Parameter(torch.zeros_like(grad))
            alone.grad = grad.clone()
            Muon([alone], adjust_lr_fn="original").step()
            for matrix in section.reshape(-1, 6, 8):
                torch.testing.assert_close(matrix, alone.detach())


def test_the_momentum_is_not_changed_by_the_orthogonalisation():
    """Muon of torch 2.13 divides the momentum itself by its norm, if it is in bfloat16 and without Nesterov."""
    param = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.bfloat16))
    optimizer = Muon([param], nesterov=False, momentum=0.5)
    param.grad = torch.full((4, 4), 2.0, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(optimizer.state[param]["momentum_buffer"], torch.ones(4, 4, dtype=torch.bfloat16))


def test_matrices_are_assigned_to_ranks_by_cost_and_stacks_in_blocks():
    shapes = {0: ((4, 4), ()), 1: ((64, 64), ()), 2: ((3, 8, 8), ()), 5: ((16, 16), ())}
    blocks, first, second = rounds_of(shapes, 2)
    assert {rank: assigned.box[0] for rank, assigned in blocks.items()} == {0: (0, 2), 1: (2, 1)}
    assert [assigned.index for assigned in first.values()] == [1, 5]
    assert [assigned.index for assigned in second.values()] == [0]


def test_a_parameter_that_is_no_matrix_is_refused():
    with pytest.raises(ParallelError, match=r"parameter of the shape \(3,\): .*AdamW"):
        Muon([torch.nn.Parameter(torch.zeros(3))])
