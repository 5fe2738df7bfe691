"""What only a GPU can show: FLA's own Triton kernels under a plan, over NCCL. Skipped, and counted, without one."""

import pytest
import torch
import worlds
from torch.distributed.tensor import DTensor

from titanplans import modeling
from titanplans.modeling import kernels

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def gradients(device: str, mesh=None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients of GLA's debug flavor, float32, the same weights on every device."""
    from titanplans import apply_plan

    model = modeling.build(modeling.load_config("gla", "debug"))
    if mesh is not None:
        apply_plan(model, mesh, loss_parallel=False)
    model.to_empty(device="cpu")
    modeling.initialize(model, seed=0)
    model.to(device)
    tokens = torch.randint(0, 4096, (2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    whole = {
        n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for n, p in model.named_parameters()
    }
    return loss.item(), {name: grad.cpu() for name, grad in whole.items()}


def assert_close(actual, expected):
    # Triton's dot products round their float32 inputs to TF32, 2^-11 relative; sums make some tens of that.
    assert actual[0] == pytest.approx(expected[0], rel=1e-3)
    for name, grad in expected[1].items():
        error = (actual[1][name] - grad).norm() / grad.norm()
        assert error < 2e-2, f"{name}: {error}"


def test_fla_kernels_on_a_gpu_equal_ours_on_a_cpu():
    kernels.install("cpu")
    assert_close(gradients("cuda"), gradients("cpu"))


def split_over_two(rank):
    from torch.distributed.device_mesh import init_device_mesh

    return gradients("cuda", init_device_mesh("cuda", (2,), mesh_dim_names=("tp",)))


@two_gpus
def test_tensor_parallel_over_nccl_equals_one_gpu():
    assert_close(worlds.run(split_over_two, 2, backend="nccl"), gradients("cuda"))
