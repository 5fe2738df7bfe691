"""FLA's Triton kernels under a plan, over NCCL. The tests need a GPU, and are skipped and counted without one."""

import subprocess
import sys

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.support import process_groups
from titanplans import kernels, modeling

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


several_gpus = pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(
            n, marks=pytest.mark.skipif(torch.cuda.device_count() < n, reason=f"needs {n} CUDA devices")
        )
        for n in (1, 2, 4, 8)
    ],
)
WITH_KERNELS = (
    "gla",
    "gated_deltanet",
    "delta_net",
    "kda",
    "hgrn2",
    "linear_attn",
    "mamba2",
    "retnet",
    "rwkv7",
)
"""FLA architectures with different kernels, in their debug flavors."""


def gradients(
    device: str, mesh=None, name: str = "gla", dtype: torch.dtype = torch.float32
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and full gradients of a debug flavor, with the same weights on every device."""
    from titanplans import apply_plan

    model = modeling.build(modeling.load_config(name, "debug"))
    if mesh is not None:
        apply_plan(model, mesh, loss_parallel=False)
    model.to_empty(device="cpu")
    modeling.initialize(model, seed=0)
    model.to(device, dtype)
    tokens = torch.randint(0, 4096, (2, 129), generator=torch.Generator().manual_seed(0)).to(device)
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    full = {
        n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for n, p in model.named_parameters()
    }
    return loss.item(), {name: grad.cpu() for name, grad in full.items()}


def assert_close(actual, expected):
    # Triton's dot products round float32 inputs to TF32, by a relative 2^-11; sums amplify it some tens of times.
    assert actual[0] == pytest.approx(expected[0], rel=1e-3)
    for name, grad in expected[1].items():
        off, size = (actual[1][name].double() - grad.double()).norm(), grad.double().norm()
        # rwkv7 has weights of zero, whose gradients may be 0
        assert off <= 2e-2 * size + 1e-8, f"{name}: {off} of {size}"


def assert_as_good(split, unsplit, exact):
    """Check that in bfloat16 the split model's error, compared with float32, is at most twice the unsplit model's
    error."""
    for name, grad in exact.items():
        allowed = 2 * (unsplit[name].double() - grad.double()).norm() + 1e-8
        assert (split[name].double() - grad.double()).norm() <= allowed, name


def test_fla_kernels_on_a_gpu_equal_their_stand_ins_on_a_cpu():
    kernels.install("cpu")
    assert_close(gradients("cuda"), gradients("cpu"))


def split_over_all(rank, device="cuda"):
    """Return loss and gradients of each architecture in float32, and of one in bfloat16, split over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    results = {}
    for name in WITH_KERNELS:
        results[name] = gradients(device, mesh, name)
    results["bfloat16"] = gradients(device, mesh, "gla", torch.bfloat16)
    return results


@several_gpus
def test_tensor_parallel_over_nccl_equals_one_gpu(ranks):
    results = process_groups.run(split_over_all, ranks, backend="nccl")
    for name in WITH_KERNELS:
        assert_close(results[name], gradients("cuda", name=name))
    assert_as_good(results["bfloat16"][1], gradients("cuda", dtype=torch.bfloat16)[1], gradients("cuda")[1])


@pytest.mark.parametrize("name", ["qwen3", "gla", "mamba2"])
def test_a_plan_is_proved_with_all_ranks_on_one_gpu(name):
    command = ("-m", "titanplans", "verify", name, "--device", "cuda", "--tp", "2", "--cp", "2", "--quick")
    proof = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=600)
    assert proof.returncode == 0, proof.stderr
    assert "threads on one cuda device" in proof.stdout


def steps_that_wait(rank, device="cuda"):
    """Run two steps of a manager, the second of which may not synchronise with the device; return the gradient norms."""
    from titanplans.parallel import Degrees, FSDP2Config, ParallelManager

    manager = ParallelManager(
        FSDP2Config(), Degrees(tp=torch.distributed.get_world_size()), device_type=device
    )
    model = manager.parallelize(modeling.build(modeling.load_config("qwen3", "debug")))
    manager.to_empty()
    modeling.initialize(model, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_of = manager.prepare_loss(manager.cross_entropy)
    tokens = torch.randint(0, 4096, (2, 64), generator=torch.Generator().manual_seed(0)).to(device)
    norms = []
    for index in range(2):
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error" if index else "default")
        loss_of(
            model(input_ids=tokens, use_cache=False).logits, tokens.roll(-1, 1), tokens.numel()
        ).backward()
        norms.append(manager.clip_gradients(1.0))
        optimizer.step()
        optimizer.zero_grad()
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return [norm.item() for norm in norms]


@several_gpus
def test_a_step_does_not_wait_for_the_device(ranks):
    first, second = process_groups.run(steps_that_wait, ranks, backend="nccl")
    assert first > second > 0
