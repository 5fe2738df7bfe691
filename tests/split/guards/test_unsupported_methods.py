"""Methods that expect full weights: full state dicts are distributed, and transformers' methods are refused."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from tests import zoo
from tests.support import process_groups
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import PlanError, apply_plan
from titanplans.parallel import Degrees, FSDP2Config, ParallelManager, align_gradients
from titanplans.proof.ranks import threads

CPU = torch.device("cpu")
TOKENS = torch.arange(16)[None]


def llama(**options):
    return zoo.build("llama", dtype=torch.float32, vocab_size=97, num_key_value_heads=2, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.init_weights(), r"init_weights .*initialize\(model, seed=0\)"),
        (lambda model: model.apply(model._init_weights), r"_init_weights .*initialize\(model, seed=0\)"),
        (lambda model: model.model.init_weights(), r"LlamaModel.init_weights"),
        (lambda model: model.lm_head.reset_parameters(), "reset_parameters .*load_state_dict"),
        (lambda model: model.resize_token_embeddings(128), "resize_token_embeddings .*before"),
        (lambda model: model.tie_weights(), "tie_weights .*tied"),
        (lambda model: model.save_pretrained("nowhere"), r"save_pretrained.*titanplans.save_weights"),
    ],
    ids=["init_weights", "apply", "base", "reset", "resize", "tie", "save"],
)
def test_methods_that_expect_full_weights_are_refused(call, message):
    def work(world):
        model = llama()
        apply_plan(model, world.mesh)
        call(model)

    with pytest.raises(PlanError, match=message):
        threads.run(1, CPU, work)


def loading(rank):
    """On each kind of mesh, load a full state dict, and save one to a file."""
    full = {name: value * 2 + 1 for name, value in llama().state_dict().items()}
    wrong, saved = [], []
    for degrees in (Degrees(tp=4), Degrees(tp=2), Degrees(dp_replicate=2, dp_shard=1, tp=2)):
        config = FSDP2Config(disable_loss_parallel=True)
        model = ParallelManager(config, degrees, device_type="cpu").parallelize(llama())
        assert not model.load_state_dict(full).missing_keys
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        wrong += [name for name, value in (state if rank == 0 else {}).items() if not value.equal(full[name])]
        if rank == 0:
            model.save_pretrained("saved", state_dict=state)
            saved.append(type(model).from_pretrained("saved").lm_head.weight.equal(full["lm_head.weight"]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, dict(full) if rank == 0 else {}, options=options)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        wrong += [name for name, value in state.items() if not value.equal(full[name])]
        wrong += other_batches(model, rank)
    return wrong, saved


def other_batches(model, rank):
    """Different batches are correct on data-parallel ranks, and an error on ranks over which a model is split."""
    mesh = model.lm_head._parameters["weight"].device_mesh
    tp = mesh.get_local_rank("tp")
    try:
        with torch.no_grad():
            model(TOKENS + rank)
        return ["not noticed"]
    except PlanError as error:
        results = (
            []
            if "different input_ids on model-parallel rank 1 than on rank 0" in str(error)
            else [str(error)]
        )
    model(TOKENS + rank - tp).logits.sum().backward()
    return results


def test_full_state_dicts_are_loaded_and_saved(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert process_groups.run(loading, 4) == ([], [True] * 3)


def test_full_state_dicts_without_fsdp_and_with_another_shape():
    full, untied = Tiny(tied=True).state_dict(), Tiny().state_dict()

    def work(world):
        model = Tiny(tied=True)
        apply_plan(model, world.mesh, plan=TinyPlan)
        model.load_state_dict(full)
        right = [p.full_tensor().equal(full[name]) for name, p in model.named_parameters()]
        model.layers.load_state_dict(
            {k.removeprefix("layers."): v for k, v in untied.items() if "layers" in k}
        )
        right += [
            p.full_tensor().equal(untied[name]) for name, p in model.named_parameters() if "layers" in name
        ]
        with pytest.raises(RuntimeError, match=r"size mismatch for norm\.weight"):
            model.load_state_dict(full | {"norm.weight": torch.ones(8)})
        return all(right)

    assert threads.run(4, CPU, work)


def test_gradients_clipped_by_value():
    def gradients(model, logits):
        logits.pow(2).mean().backward()
        align_gradients(model.parameters())
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    unsplit = llama()
    expected = gradients(unsplit, unsplit(TOKENS).logits)

    def work(world):
        model = llama()
        apply_plan(model, world.mesh, loss_parallel=False)
        grads = gradients(model, model(TOKENS).logits)
        return max((grad.full_tensor() - expected[name]).abs().max().item() for name, grad in grads.items())

    assert threads.run(2, CPU, work) < 1e-7
