"""Float8 on a GPU: kernels instead of emulation, and float8 all-gathers over NCCL. Skipped and counted without a GPU."""

import pytest
import torch
from torch import nn

from tests.support import process_groups
from titanplans import modeling
from titanplans.parallel import Float8, convert_to_float8
from titanplans.split.converted import RECIPES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs a CUDA device of capability 9.0",
    ),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_rank_is_bit_identical_to_torchao(recipe):
    from titanplans.precision.float8.linear import Split, split_linear

    torch.manual_seed(0)
    unsplit = nn.Sequential(nn.Linear(256, 128)).to("cuda", torch.bfloat16)
    split = nn.Sequential(nn.Linear(256, 128)).to("cuda", torch.bfloat16)
    split.load_state_dict(unsplit.state_dict())
    for model in (unsplit, split):
        convert_to_float8(model, Float8(recipe_name=recipe), "cuda")
    split_linear(split[0], Split(("no group", 1)))
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16, device="cuda")
    results = []
    for model in (unsplit, split):
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        (y * torch.linspace(-1, 1, 128, device="cuda")).sum().backward()
        results.append((y.detach(), leaf.grad, model[0].weight.grad))
    for ours, torchaos in zip(*results, strict=True):
        assert torch.equal(ours, torchaos)


def loss_of_a_step(mesh=None) -> float:
    from titanplans import apply_plan

    model = modeling.build(modeling.load_config("qwen3", "debug"))
    convert_to_float8(model, Float8(recipe_name="tensorwise"), "cuda")
    if mesh is not None:
        apply_plan(model, mesh, loss_parallel=False)
    model.to_empty(device="cpu")
    modeling.initialize(model, seed=0)
    model.to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 4096, (2, 129), generator=torch.Generator().manual_seed(0)).to("cuda")
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item()


def split_over_two(rank):
    from torch.distributed.device_mesh import init_device_mesh

    return loss_of_a_step(init_device_mesh("cuda", (2,), mesh_dim_names=("tp",)))


@two_gpus
def test_float8_gathers_over_nccl_give_the_loss_of_one_gpu():
    # Sums in bfloat16 are computed in another order, and this moves some values to another float8 number.
    assert process_groups.run(split_over_two, 2, backend="nccl") == pytest.approx(loss_of_a_step(), rel=1e-2)
