"""The norm of gradients with any placements equals that of the full gradients, and clipping scales all by one factor."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests.support import process_groups, step_comparison
from tests.zoo import odd_qwen3
from titanplans import apply_plan
from titanplans.errors import ParallelError
from titanplans.parallel.mesh.mesh import Mesh
from titanplans.plan.degrees import Degrees
from titanplans.split.gradients import check_no_meta, clip_gradients, skip_nonfinite, total_norm
from titanplans.split.objects import gather_objects

NORMS = (1.0, 2.0, 3.0, math.inf)
MODELS = {
    "tp 4, Partial gradients, a head for two ranks": dict(tp=4),
    "tp 2 x fsdp 2": dict(tp=2),
    "tp 2 x replicate 2": dict(tp=2, dp_replicate=2),
    "fsdp 4": dict(),
    "hsdp 2 x 2": dict(dp_replicate=2),
}
CALLS = dict(zip(MODELS, (1, 2, 1, 1, 1), strict=True))  # number of all-reduces for one norm
MIXES = 16


def by_definition(tensors, p):
    each = torch.cat([tensor.double().flatten().abs() for tensor in tensors] or [torch.zeros(1).double()])
    return each.max().item() if math.isinf(p) else each.pow(p).sum().item() ** (1 / p)


def backward(model):
    tokens = torch.randint(0, 97, (2, 32), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=tokens, use_cache=False).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()


def gradients_of(model):
    return {name: step_comparison.full_copy(param.grad) for name, param in model.named_parameters()}


def split_model(degrees):
    """Return the norms, the all-reduces of one norm, and the clipped gradients of qwen3 (8 heads, 2 key/value heads)."""
    mesh, model = Mesh(Degrees(**degrees), "cpu"), odd_qwen3()
    if mesh.tp_enabled:
        apply_plan(model, mesh.get_mesh("tp"), loss_parallel=False)
    if mesh.dp_enabled:
        names = ["dp_replicate", "fsdp"] if mesh.dp_replicate_enabled else "fsdp"
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh.get_mesh(names))
    backward(model)
    partial = sum(
        any(p.is_partial() for p in param.grad.placements)
        for param in model.parameters()
        if isinstance(param.grad, DTensor)
    )
    norms = [total_norm(model.parameters(), p).item() for p in NORMS]
    with CommDebugMode() as calls:
        before = clip_gradients(model.parameters(), norms[1] / 2).item()
    return norms, before, calls.get_total_counts(), partial, gradients_of(model)


def random_parameter(rng, mesh, generator):
    """Return a parameter with random placements, and its full gradient or None."""
    shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.choice([1, 2]))]
    dtype = rng.choice([torch.float32, torch.bfloat16])
    full = torch.randn(shape, generator=generator).to(dtype)
    missing = rng.random() < 0.15
    where = rng.choice([None, "tp", "fsdp", ("fsdp", "tp")])
    if where is None:
        param = nn.Parameter(torch.zeros(shape, dtype=dtype))
        param.grad = None if missing else full.clone()
        return param, None if missing else full
    mesh = mesh.get_mesh(where)
    layouts = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = [rng.choice(layouts) for _ in range(mesh.ndim)]
    zeros = torch.zeros(shape, dtype=dtype)
    param = nn.Parameter(distribute_tensor(zeros, mesh, placements, src_data_rank=None))
    # The backward may give a gradient its parameter's placement, Partial, or another.
    laid_out = [rng.choice([placement, Partial(), rng.choice(layouts)]) for placement in placements]
    if Partial() in laid_out:
        full = full.to(torch.float32).mul(64).round()  # any sum of integers is exact
        param = nn.Parameter(distribute_tensor(zeros.float(), mesh, placements, src_data_rank=None))
    local = full
    for dim, placement in enumerate(laid_out):
        if placement.is_partial():
            summand = torch.randn(full.shape, generator=generator).mul(64).round()
            rank, last = mesh.get_local_rank(dim), mesh.size(dim) - 1
            # Split `local` into random terms that add up to it; the terms are sharded below like a full tensor.
            local = local - summand if rank == last else torch.zeros_like(summand)
            local = local + summand if rank == 0 else local
    for dim, placement in enumerate(laid_out):
        if placement.is_shard():
            axis = mesh[mesh.mesh_dim_names[dim]] if mesh.ndim > 1 else mesh
            local = distribute_tensor(local, axis, [placement], src_data_rank=None).to_local()
    if missing:
        return param, None
    param.grad = DTensor.from_local(
        local.clone(), mesh, laid_out, run_check=False, shape=full.shape, stride=full.stride()
    )
    return param, full


def random_mix(seed, mesh):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pairs = [random_parameter(rng, mesh, generator) for _ in range(rng.randint(1, 8))]
    params, all_full = [param for param, _ in pairs], [full for _, full in pairs]
    there = [full for full in all_full if full is not None]
    p = rng.choice(NORMS)
    expected = by_definition(there, p)
    norm = total_norm(params, p)
    assert not isinstance(norm, DTensor)
    assert norm.item() == pytest.approx(expected, rel=1e-5), (seed, p)
    assert clip_gradients(params, expected / 4 or 1.0, p).item() == norm.item()  # the norm did not change
    for param, full in pairs:
        assert (param.grad is None) == (full is None)
        if full is None:
            continue
        grad = param.grad
        if isinstance(param, DTensor):
            assert grad.placements == param.placements
            grad = grad.full_tensor()
        # bfloat16 keeps 8 bits: the product is rounded once.
        torch.testing.assert_close(grad.float(), full.float() / 4, rtol=5e-3, atol=1e-6, msg=f"seed {seed}")


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_any_mix_over_ranks_that_are_threads(seed, ranks):
    def one_mesh(world):
        random_mix(seed, SimpleNamespace(get_mesh=lambda where: world.mesh))

    process_groups.run_on_threads(one_mesh, ranks)


def not_finite(mesh, value):
    """Return the norms, decisions and errors of this rank, with a NaN or infinity in the shard of one rank."""
    results = []
    for p in NORMS:
        param = nn.Parameter(
            distribute_tensor(torch.zeros(8), mesh.get_mesh(["fsdp", "tp"]), [Shard(0), Shard(0)])
        )
        param.grad = torch.ones_like(param)
        if dist.get_rank() == 2:
            param.grad.to_local()[1] = value
        norm = total_norm([param], p)
        results.append((p, norm.item(), skip_nonfinite(norm)))
        try:
            clip_gradients([param], 1.0, p, error_if_nonfinite=True)
        except ParallelError as error:
            results[-1] += (str(error),)
    return results


def stages():
    """Return norms and expected norms of two pipeline stages with different parameters, each sharded over two ranks."""
    mesh = Mesh(Degrees(pp=2, tp=2), "cpu")
    tp, generator = mesh.get_mesh("tp"), torch.Generator().manual_seed(0)
    full_tensors = [torch.randn(6, 4, generator=generator) for _ in range(5)]
    here = [(0, [Shard(0)]), (1, [Replicate()])]
    if mesh.get_mesh("pp").get_local_rank():
        here = [(2, [Replicate()]), (3, [Shard(1)]), (4, [Shard(0)])]
    params = []
    for index, placements in here:
        param = nn.Parameter(distribute_tensor(torch.zeros(6, 4), tp, placements))
        param.grad = distribute_tensor(full_tensors[index], tp, placements)
        params.append(param)
    group = mesh.get_mesh("pp").get_group()
    return [(total_norm(params, p, pp_group=group).item(), by_definition(full_tensors, p)) for p in NORMS]


def missing_on_one_rank(mesh):
    param = nn.Parameter(distribute_tensor(torch.zeros(4), mesh.get_mesh("fsdp"), [Shard(0)]))
    if mesh.get_mesh("fsdp").get_local_rank() == 0:
        param.grad = torch.ones_like(param)
    return total_norm([param]).item()


def everything(rank):
    models = {name: split_model(degrees) for name, degrees in MODELS.items()}
    mesh = Mesh(Degrees(tp=2), "cpu")
    for seed in range(MIXES):
        random_mix(seed, mesh)
    of_rank = {
        "nan": not_finite(mesh, math.nan),
        "inf": not_finite(mesh, math.inf),
        "one rank's": skip_nonfinite(torch.tensor(math.inf if rank == 3 else 1.0)),
        "finite": skip_nonfinite(torch.tensor(1.0)),
        "stages": stages(),
        "missing": missing_on_one_rank(mesh),
    }
    return models, gather_objects(of_rank)


result = process_groups.module_fixture(everything, 4)


@pytest.fixture(scope="module")
def reference():
    model = odd_qwen3()
    backward(model)
    return gradients_of(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_split_model_has_the_single_process_norm(name, result, reference):
    norms, before, calls, partial, clipped = result[0][name]
    for p, norm in zip(NORMS, norms, strict=True):
        # float32, sums of some thousand terms in another order: some tens of epsilons (1.2e-7).
        assert norm == pytest.approx(by_definition(reference.values(), p), rel=1e-5), p
    assert (partial > 0) == (name.startswith("tp 4"))  # otherwise FSDP has reduced them
    assert before == pytest.approx(norms[1], rel=1e-6)
    for key, grad in reference.items():
        torch.testing.assert_close(
            clipped[key], grad / 2, rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )
    # One all-reduce for each sharding dimension; replicas have the same gradients.
    assert calls == CALLS[name]


def test_every_rank_sees_a_nonfinite_gradient_of_one_rank(result):
    for of_rank in result[1]:
        for kind in ("nan", "inf"):
            for p, norm, skip, error in of_rank[kind]:
                assert math.isnan(norm) if kind == "nan" else norm == math.inf, p
                assert skip is True
                assert f"{p:g}-norm of the gradients is {kind}" in error
        assert of_rank["one rank's"] is True
        assert of_rank["finite"] is False


def test_pipeline_stages_add_up(result):
    for of_rank in result[1]:
        for norm, expected in of_rank["stages"]:
            assert norm == pytest.approx(expected, rel=1e-6)


def test_no_rank_waits_for_one_without_a_gradient(result):
    assert all(of_rank["missing"] == pytest.approx(math.sqrt(2)) for of_rank in result[1])


def test_many_terms_and_low_precision():
    for dtype in (torch.bfloat16, torch.float32):
        param = nn.Parameter(torch.zeros(1 << 20, dtype=dtype))
        param.grad = torch.full_like(param, 1e-3)
        # Summed one by one, the squares stop growing at 256 terms in bfloat16, and are 2e-4 off in float32.
        assert total_norm(param).item() == pytest.approx(param.grad[0].item() * 2**10, rel=1e-5)
    param = nn.Parameter(torch.zeros(8, dtype=torch.float16))
    param.grad = torch.full_like(param, 6e4)  # its square is too large for float16
    assert total_norm([param], 2.0).item() == pytest.approx(6e4 * math.sqrt(8), rel=1e-3)


def test_gradients_below_the_limit_are_unchanged():
    param = nn.Parameter(torch.zeros(3))
    param.grad = torch.tensor([1.0, 2.0, 2.0])
    for limit in (3.1, math.inf):
        assert clip_gradients([param], limit).item() == 3.0
        assert param.grad.tolist() == [1.0, 2.0, 2.0]
    assert clip_gradients([param], 1.5).item() == 3.0
    torch.testing.assert_close(param.grad, torch.tensor([0.5, 1.0, 1.0]))


def test_the_norm_without_gradients_is_zero():
    assert total_norm([]).item() == total_norm([nn.Parameter(torch.zeros(2))], math.inf).item() == 0.0
    assert skip_nonfinite(torch.tensor(0.0)) is False


def test_float64_stays():
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.full_like(param, 1 + 1e-12)
    assert total_norm([param]).item() == 1 + 1e-12


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_invalid_norms_are_refused(value):
    with pytest.raises(ParallelError, match="norm_type = "):
        total_norm([], value)
    with pytest.raises(ParallelError, match="max_norm = "):
        clip_gradients([], value)


def test_gradients_on_meta_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    check_no_meta(model)
    model[1].to("meta")
    with pytest.raises(ParallelError) as error:
        check_no_meta(model)
    assert "1.weight, 1.bias, 1.running_mean, 1.running_var, 1.num_batches_tracked: call" in str(error.value)
    assert str(error.value).startswith("still on meta")
    with pytest.raises(ParallelError, match=r"0\.bias, 1\.weight, 1\.bias, 1\.running_mean and 2 more"):
        check_no_meta(model.to("meta"))
