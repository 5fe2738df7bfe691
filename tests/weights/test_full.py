"""Full tensors loaded into split models and gathered again on four ranks are bit-identical to those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from tests import zoo
from tests.support import process_groups
from tests.support.refusals import refusal_or_none
from tests.support.resident_memory import peak
from titanplans import DDPConfig, Degrees, FSDP2Config, ParallelManager
from titanplans.errors import ModelError
from titanplans.split.objects import gather_objects
from titanplans.weights.full import (
    gather_full_optimizer_state_dict,
    gather_full_state_dict,
    load_full_optimizer_state_dict,
    load_full_state_dict,
)

pytestmark = pytest.mark.thorough

SPLITS = {
    "tp 4": (FSDP2Config(), Degrees(tp=4)),
    "fsdp 2 x tp 2": (FSDP2Config(), Degrees(tp=2)),
    "fsdp 4": (FSDP2Config(), Degrees()),
    "hsdp 2 x 2": (FSDP2Config(), Degrees(dp_replicate=2)),
    "tp 2, two copies": (FSDP2Config(), Degrees(dp_replicate=2, dp_shard=1, tp=2)),
    "ddp 4": (DDPConfig(), Degrees(dp_replicate=4, dp_shard=1)),
}
# Ranks share heads at tp 4, and no degree divides the vocabulary or the width. Phi-3 has packed weights.
MODELS = {
    "qwen3": dict(num_key_value_heads=2, **zoo.ODD),
    "phi3": dict(intermediate_size=44, vocab_size=97),
}


def build(name):
    model = zoo.build(name, dtype=torch.float32, **MODELS[name])
    model.register_buffer("seen", torch.arange(3.0))  # a persistent buffer
    return model


def stepped(model):
    """Return an optimizer of `model` after one step, which changed every weight."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def differing(actual, expected):
    assert list(actual) == list(expected)
    return [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]


def moments(state):
    return {
        f"{name} {key}": value for name, values in state["state"].items() for key, value in values.items()
    }


def refused(model, state, **options):
    return refusal_or_none(load_full_state_dict, model, state, kind=ModelError, **options)


def refusals(rank):
    """Return the errors of each rank for states that do not fit the model, by fault."""
    model = ParallelManager(FSDP2Config(), Degrees(tp=2), device_type="cpu").parallelize(build("qwen3"))
    state_dict = build("qwen3").state_dict()
    norm, head = "model.norm.weight", "lm_head.weight"
    states = {
        "lacking": {name: tensor for name, tensor in state_dict.items() if "q_proj" not in name},
        "unknown": state_dict | {"model.nrm.weight": state_dict[norm]},
        "shape": state_dict | {norm: torch.zeros(65)},
        "tied": state_dict | {head: state_dict[head] + 1},
    }
    message = {case: refused(model, state if rank == 0 else None) for case, state in states.items()}
    message["none"] = refused(model, None)
    message["one rank's own"] = refused(model, state_dict | ({norm: torch.zeros(65)} if rank == 3 else {}))
    message["not strict"] = refused(model, states["lacking"] if rank == 0 else None, strict=False)
    optimizer = torch.optim.AdamW(model.parameters())
    state = gather_full_optimizer_state_dict(model, optimizer)
    halves = list(model.parameters())
    optimizer_of_other_groups = torch.optim.AdamW([{"params": halves[:3]}, {"params": halves[3:]}])
    message["groups"] = refusal_or_none(
        load_full_optimizer_state_dict, model, optimizer_of_other_groups, state or None
    )
    with torch.device("meta"):
        message["meta"] = refused(nn.Linear(2, 2), {"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    only = gather_full_state_dict(model, only=lambda name: "norm" in name)
    assert len(only) == (0 if rank else 9)
    assert all(others == message for others in gather_objects(message))
    return message


def memory(rank):
    """Return the growth of each rank's memory, in MB, while 96 MB in tensors of 4 MB are gathered and loaded."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    gathered, state = peak(lambda: gather_full_state_dict(model))
    loaded, _ = peak(lambda: load_full_state_dict(model, state or None))
    return gather_objects((gathered, loaded))


def round_trip(rank):
    results = {}
    for name in MODELS:
        unsplit = build(name)
        optimizer = stepped(unsplit)
        expected, expected_moments = (
            unsplit.state_dict(),
            moments(get_optimizer_state_dict(unsplit, optimizer)),
        )
        for split, (config, degrees) in SPLITS.items():
            if name != "qwen3" and split not in ("tp 4", "fsdp 2 x tp 2"):
                continue
            model = ParallelManager(config, degrees, device_type="cpu").parallelize(build(name))
            optimizer = stepped(model)
            state, optimizer_state = (
                gather_full_state_dict(model),
                gather_full_optimizer_state_dict(model, optimizer),
            )
            differences = results[name, split] = {}
            if rank == 0:
                differences["gathered"] = differing(state, expected)
                differences["gathered, optimizer"] = differing(moments(optimizer_state), expected_moments)
                assert all(tensor.is_contiguous() for tensor in state.values())
            else:
                assert state == optimizer_state == {}
            for case in ("from rank 0", "on every rank") if split == "fsdp 2 x tp 2" else ("from rank 0",):
                model = ParallelManager(config, degrees, device_type="cpu").parallelize(build(name))
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
                states = [state or None, optimizer_state or None]
                if case == "on every rank":
                    dist.broadcast_object_list(states)
                load_full_state_dict(model, states[0])
                load_full_optimizer_state_dict(model, optimizer, states[1])
                again, moments_again = (
                    gather_full_state_dict(model),
                    gather_full_optimizer_state_dict(model, optimizer),
                )
                if rank == 0:
                    differences[case] = differing(again, expected) + differing(
                        moments(moments_again), expected_moments
                    )
                assert optimizer.param_groups[0]["lr"] == 0.1
    return results


def without_gradients(rank):
    """Return the parameters with optimizer state before and after loading. The embeddings never had a gradient."""
    config, degrees = SPLITS["fsdp 2 x tp 2"]
    states = []
    for _ in range(2):
        model = ParallelManager(config, degrees, device_type="cpu").parallelize(build("phi3"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if states:
            load_full_optimizer_state_dict(model, optimizer, states[0] or None)
        for name, parameter in model.named_parameters():
            parameter.grad = None if "embed" in name else parameter.detach().clone()
        if not states:
            optimizer.step()
        optimizer.zero_grad()
        states.append(gather_full_optimizer_state_dict(model, optimizer))
    return None if rank else [[*state["state"]] for state in states]


def everything(rank):
    return round_trip(rank), refusals(rank), memory(rank), without_gradients(rank)


results = process_groups.module_fixture(everything, 4)


def test_gathered_and_loaded_tensors_equal_those_of_one_process(results):
    assert len(results[0]) == 8
    for case, wrong in results[0].items():
        assert not any(wrong.values()), case


def test_a_state_that_does_not_fit_is_refused_by_every_rank(results):
    message = results[1]
    q, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    begin = "the model can't be loaded: "
    assert message.pop("not strict") is None
    words = {
        "lacking": f"{begin}2 tensors missing ({q}, model.layers.1.self_attn.q_proj.weight)",
        "unknown": f"{begin}1 tensor unexpected (model.nrm.weight)",
        "shape": f"{begin}1 tensor of another shape ({norm} (65,), expected (64,))",
        "tied": f"{begin}1 tensor tied in the model, but with different values in the state "
        "(lm_head.weight and model.embed_tokens.weight)",
        "none": f"{begin}rank 0 has no state",
        "one rank's own": f"{begin}1 tensor of another shape ({norm} (65,), expected (64,))",
        "groups": "the optimizer can't be loaded: the state was gathered with other parameter groups",
        "meta": f"{begin}2 tensors without memory yet",
    }
    assert {case: text[: len(words[case])] for case, text in message.items()} == words
    assert message["meta"].endswith(" (weight, bias)")


def test_a_parameter_without_gradients_has_no_optimizer_state(results):
    before, after = results[3]
    assert before == after
    assert not any("embed" in name for name in before)
    assert len(before) > 5


def test_rank_0_holds_the_state_once_and_others_one_tensor(results):
    state, tensor = 96, 4
    (first, first_loads), *others = results[2]
    assert first < state + 6 * tensor
    assert first_loads < 6 * tensor
    for gathers, loads in others:
        assert max(gathers, loads) < 6 * tensor
