"""Plans under context parallelism, over real process groups: loss and gradients equal those of the unsplit model."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from tests import zoo
from tests.support.plain_proofs import verify_plain
from tests.support.process_groups import run
from tests.support.step_comparison import summed_cross_entropy
from tests.support.tiny_model import changed
from titanplans import Degrees, apply_plan, check_plan, kernels, registered_plans
from titanplans.config import Float8
from titanplans.errors import PlanError
from titanplans.parallel import cross_entropy
from titanplans.precision.float8.conversion import convert_to_float8
from titanplans.split.gradients import align_gradients, total_norm
from titanplans.split.tokens.exchange import ranges_within


def gradient_errors(rank, name, cp, tp, length):
    """Return the error of each parameter's gradient, relative to the largest element of the unsplit model's gradient."""
    kernels.install("cpu")
    model = zoo.build(name).double().train()
    inputs = zoo.inputs(name, seq_len=length)
    labels = torch.roll(inputs["input_ids"], -1, 1)
    summed_cross_entropy(model(**inputs).logits, labels).backward()
    expected = {key: param.grad.clone() for key, param in model.named_parameters()}
    sizes = {"cp": cp} | ({"tp": tp} if tp > 1 else {})
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    apply_plan(model, mesh)
    worst = {}
    for _ in range(2):
        model.zero_grad()
        logits = model(**inputs).logits
        assert isinstance(logits, DTensor)
        assert logits.shape[:2] == labels.shape
        cross_entropy(logits, labels, 1).backward()
        align_gradients(model.parameters())
        gradients = {key: param.grad.full_tensor() for key, param in model.named_parameters()}
        worst |= {
            key: ((gradients[key] - grad).abs().max() / grad.abs().max().clamp(min=1e-30)).item()
            for key, grad in expected.items()
        }
    return worst


@pytest.mark.parametrize("name", ["qwen3", "gla", "mamba2"])
@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (2, 2)])
def test_a_plan_under_context_parallelism_has_the_gradients_of_the_unsplit_model(name, cp, tp):
    worst = run(partial(gradient_errors, name=name, cp=cp, tp=tp, length=32), cp * tp)
    # Sums in another order, in float64; FLA's norms compute in float32.
    assert max(worst.values()) < 1e-6, {key: error for key, error in worst.items() if error > 1e-6}


def under_fully_shard(rank):
    """`fully_shard` over "dp" averages the gradients, after they are summed over "cp"."""
    kernels.install("cpu")
    model = zoo.build("llama").double().train()
    batches = [zoo.inputs("llama", seq_len=16, seed=seed) for seed in range(2)]
    for batch in batches:
        labels = torch.roll(batch["input_ids"], -1, 1)
        cross_entropy(model(**batch).logits, labels, 2).backward()
    expected = {key: param.grad.clone() for key, param in model.named_parameters()}
    norm = total_norm(model.parameters()).item()
    model.zero_grad()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    apply_plan(model, mesh["cp"])
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    batch = batches[mesh["dp"].get_local_rank()]
    cross_entropy(model(**batch).logits, torch.roll(batch["input_ids"], -1, 1), 1).backward()
    split_norm = total_norm(model.parameters()).item()
    assert split_norm == pytest.approx(norm, rel=1e-9), (split_norm, norm)
    for key, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), expected[key], rtol=1e-9, atol=1e-12)


def test_fully_shard_of_torch_is_applied_after_context_parallelism():
    run(under_fully_shard, 4)


def heads_refused(rank):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = zoo.build("llama", hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(
        PlanError, match=r"context_parallel_degree = 2 .*num_attention_heads = 3.*1 or 3 would"
    ):
        apply_plan(model, mesh)
    with pytest.raises(PlanError, match=r"dp"):
        apply_plan(zoo.build("llama"), init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")))


def test_degrees_and_meshes_that_do_not_fit_are_refused():
    run(heads_refused, 2)


def test_a_style_of_torch_in_a_mixer_is_refused():
    plan = changed(registered_plans()["llama"], lambda plan: {"q_proj": ColwiseParallel()})
    with pytest.raises(PlanError, match=r"q_proj.*ColwiseParallel.*installs its own hooks"):
        check_plan(zoo.build("llama"), Degrees(cp=2), plan=plan)


def test_float8_under_context_parallelism_is_refused():
    model = zoo.build("llama", dtype=torch.float32)
    convert_to_float8(model, Float8(recipe_name="rowwise", emulate=True), "cpu")
    with pytest.raises(PlanError, match=r"context_parallel_degree = 2: .*float8"):
        check_plan(model, Degrees(cp=2))


def test_a_plan_as_a_dict_works_under_context_parallelism():
    model = zoo.build("llama").train()
    plan = {
        "model.embed_tokens": "vocab_embedding",
        "model.layers.*.input_layernorm": "replicated_on_stream",
        "model.layers.*.post_attention_layernorm": "replicated_on_stream",
        "model.layers.*.self_attn": "attn_input",
        **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp": "mlp_input",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.norm": "replicated_on_stream",
        "lm_head": "vocab_head",
    }
    assert verify_plain(lambda: model, plan, degrees=[Degrees(cp=2)], seq_len=7).passed


def test_ranges_within_other_ranges():
    assert ranges_within(None, ((2, 2),)) == ((2, 2),)
    assert ranges_within(((4, 4), (12, 4)), ((6, 2), (14, 2))) == ((2, 2), (6, 2))
    with pytest.raises(ValueError, match="rows 3 to 5"):
        ranges_within(((4, 4),), ((3, 2),))
