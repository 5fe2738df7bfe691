"""The entry in torchtitan's words, over real process groups: ties, odd sizes, dtypes, torchtitan's own meshes and policies.

Combinations of options are in test_combinations.py.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import worlds
from tiny import Tiny, TinyPlan
from torch.distributed.tensor import DTensor

SMALL = dict(
    hidden_size=64, num_heads=4, num_hidden_layers=4, vocab_size=96, intermediate_size=48, use_cache=False
)
ODD = dict(vocab_size=97, intermediate_size=45, num_kv_heads=1)
BATCH, LENGTH = 4, 32

CASES = {
    "tp 2 x fsdp 2": dict(tp=2),
    "tp 4": dict(tp=4, loss_parallel=False),
    "tp 2 x replicate 2, every 2nd layer": dict(tp=2, replicate=2, ac=2, sequence_parallel=False),
    "fsdp 4, selective checkpointing": dict(tp=1, ac="selective"),
    "replicate 4": dict(tp=1, replicate=4),
    "tied, tp 2 x fsdp 2": dict(tp=2, tied=True),
    "tied, fsdp 4, always resharded": dict(tp=1, tied=True, reshard="always"),
    "gla, tp 4, full checkpointing": dict(tp=4, kind="gla", ac="full"),
    "tp 2 x fsdp 2, bfloat16": dict(tp=2, dtype="bfloat16"),
    "odd sizes, shared heads, tp 2 x fsdp 2": dict(tp=2, kind="odd"),
    "odd sizes, shared heads, tp 4": dict(tp=4, kind="odd", sequence_parallel=False),
    "odd sizes, shared heads, tp 2 x fsdp 2, compiled": dict(tp=2, kind="odd", compile=True),
    "qwen3 with odd sizes, tp 4": dict(tp=4, kind="qwen3"),
    "qwen3 with odd sizes, tp 2 x fsdp 2, gathered logits": dict(tp=2, kind="qwen3", loss_parallel=False),
    "qwen3 with odd sizes, tp 2 x fsdp 2, compiled": dict(tp=2, kind="qwen3", compile=True),
    "biases and one graph a block, tp 2 x fsdp 2": dict(tp=2, kind="tiny", compile=True),
}


def build(kind="transformer", tied=False):
    if kind == "tiny":
        torch.manual_seed(0)
        return Tiny(tied)
    if kind == "qwen3":
        return qwen3()
    from fla.models import GLAConfig, GLAForCausalLM, TransformerConfig, TransformerForCausalLM

    config, model = {
        "odd": (TransformerConfig, TransformerForCausalLM),
        "transformer": (TransformerConfig, TransformerForCausalLM),
        "gla": (GLAConfig, GLAForCausalLM),
    }[kind]
    torch.manual_seed(0)
    return model(config(**{**SMALL, **(ODD if kind == "odd" else {})}, tie_word_embeddings=tied))


def qwen3():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16, max_position_embeddings=64
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            **sizes, vocab_size=97, intermediate_size=45, num_key_value_heads=2, tie_word_embeddings=True
        )
    )


def logits_of(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


def loss_of(logits, tokens):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="sum") / (
        BATCH * LENGTH
    )


def step(model):
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    # SGD: AdamW's first step is the gradient's sign, which hides a wrong length and magnifies a rounding.
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def reference(kind="transformer", tied=False):
    model = build(kind, tied)
    tokens = all_tokens(kind)
    loss = loss_of(logits_of(model, tokens), tokens)
    loss.backward()
    norm = step(model)
    return loss.item(), norm.item(), {name: p.detach() for name, p in model.named_parameters()}


def all_tokens(kind):
    length = LENGTH - 1 if kind in ("odd", "qwen3") else LENGTH
    return torch.randint(0, 32, (BATCH, length), generator=torch.Generator().manual_seed(1))


def parallel_step(*, tp, replicate=1, ac=None, compile=False, reshard="default", kind="transformer", tied=False,
                  loss_parallel=True, sequence_parallel=True, dtype="float32"):  # fmt: skip
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import loss_parallel as on_shards
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from titanplans.parallel import EveryNthLayer, parallelize

    dims = ParallelDims(replicate, -1, 1, tp, 1, 1, dist.get_world_size(), "partial_dtensor")
    model = build(kind, tied)
    checkpointing = {
        None: None,
        "full": FullAC.Config(),
        "selective": SelectiveAC.Config(),
        2: EveryNthLayer(2),
    }
    names = [name for name, _ in model.named_parameters()]
    parallelize(
        model,
        parallel_dims=dims,
        training=SimpleNamespace(
            mixed_precision_param=dtype, mixed_precision_reduce="float32", enable_cpu_offload=False
        ),
        parallelism=SimpleNamespace(
            enable_sequence_parallel=sequence_parallel,
            fsdp_reshard_after_forward=reshard,
            enable_fsdp_symm_mem=False,
        ),
        compile_config=SimpleNamespace(
            enable=compile, components=["model"], backend="aot_eager", enable_async_tensor_parallel=False
        ),
        ac_config=checkpointing[ac],
        dump_folder="",
        loss_parallel=loss_parallel,
        plan=TinyPlan if kind == "tiny" else None,
    )
    batch = dims.get_optional_mesh("batch")
    part, parts = (batch.get_local_rank(), batch.size()) if batch else (0, 1)
    tokens = all_tokens(kind).chunk(parts)[part]
    logits = logits_of(model, tokens)
    assert isinstance(logits, DTensor) == (loss_parallel and tp > 1)
    with on_shards() if isinstance(logits, DTensor) else contextlib.nullcontext():
        loss = loss_of(logits, tokens)
        loss.backward()
    loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
    if batch:
        dist.all_reduce(loss, group=batch.get_group())
    norm = step(model)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    weights = {
        name.replace("_checkpoint_wrapped_module.", ""): p.full_tensor()
        for name, p in model.named_parameters()
    }
    assert list(weights) == names
    compiled = sum(m._compiled_call_impl is not None for m in model.modules())
    return loss.item(), norm.item(), weights, compiled


def all_cases(rank):
    from titanplans.modeling import kernels
    from titanplans.training.device import prepare_device

    prepare_device()
    kernels.install("cpu")
    return {name: parallel_step(**case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results():
    return worlds.run(all_cases, 4)


@pytest.fixture(scope="module")
def references():
    from titanplans.modeling import kernels

    kernels.install("cpu")
    return {
        key: reference(*key)
        for key in {(case.get("kind", "transformer"), case.get("tied", False)) for case in CASES.values()}
    }


@pytest.mark.parametrize("name", CASES)
def test_step_equals_single_process(name, results, references):
    case = CASES[name]
    expected_loss, expected_norm, expected = references[
        case.get("kind", "transformer"), case.get("tied", False)
    ]
    loss, norm, weights, compiled = results[name]
    if case.get("dtype") == "bfloat16":
        # 8 bits of mantissa: a product is off by up to 2^-9, a step of four layers by a few of these.
        assert loss == pytest.approx(expected_loss, rel=1e-2)
        assert norm == pytest.approx(expected_norm, rel=3e-2)
        return
    # float32, sums of a few hundred terms in another order: some tens of epsilons (1.2e-7).
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    for key, value in expected.items():
        torch.testing.assert_close(
            weights[key], value, rtol=1e-4, atol=2e-6, msg=lambda m, key=key: f"{key}: {m}"
        )
    layers = 2 if case.get("kind") in ("tiny", "qwen3") else SMALL["num_hidden_layers"]
    assert compiled == (layers if case.get("compile") else 0)
