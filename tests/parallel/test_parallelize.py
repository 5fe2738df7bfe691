"""The torchtitan-style entry over real process groups: tied weights, odd sizes, dtypes, torchtitan's meshes and policies.

Combinations of options are in test_combinations.py.
"""

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests import zoo
from tests.support import step_comparison
from tests.support.tiny_model import Tiny, TinyPlan
from tests.zoo import odd_qwen3

pytestmark = pytest.mark.thorough

CASES = {
    "tp 2 x replicate 2, every 2nd layer": dict(tp=2, replicate=2, ac=2, sequence_parallel=False),
    "fsdp 4, selective checkpointing": dict(tp=1, ac="selective"),
    "gla, tp 4, full checkpointing": dict(tp=4, kind="gla", ac="full"),
    "tied, tp 2 x fsdp 2, bfloat16": dict(tp=2, tied=True, dtype="bfloat16"),
    "default backend, tp 2 x fsdp 2": dict(tp=2, backend="spmd_types"),
    "default backend, fsdp 2 x replicate 2": dict(tp=1, replicate=2, backend="spmd_types"),
    "full_dtensor, tp 2 x replicate 2": dict(tp=2, replicate=2, backend="full_dtensor"),
    "odd sizes, shared heads, tp 4": dict(tp=4, kind="odd", sequence_parallel=False),
    "qwen3 with odd sizes, tp 2 x fsdp 2, gathered logits": dict(tp=2, kind="qwen3", loss_parallel=False),
}


def build(kind="transformer", tied=False):
    if kind == "tiny":
        return zoo.build("tiny", dtype=torch.float32)
    if kind == "qwen3":
        return odd_qwen3()
    name, sizes = ("transformer", zoo.ODD | dict(num_kv_heads=1)) if kind == "odd" else (kind, {})
    return zoo.build(name, dtype=torch.float32, options=False, tie_word_embeddings=tied, **sizes)


def split(model, *, tp, replicate=1, ac=None, compile=False, reshard="default", loss_parallel=True,
          sequence_parallel=True, dtype="float32", backend="partial_dtensor"):  # fmt: skip
    """Return the model as `parallelize` splits it, with torch's own loss, norm and clipping."""
    import torch.distributed as dist
    from torch.distributed.tensor.parallel import loss_parallel as on_shards
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    from tests.support.torchtitan_meshes import parallel_dims
    from titanplans.parallel import ActivationCheckpoint, parallelize

    dims = parallel_dims(replicate, -1, 1, tp, 1, 1, dist.get_world_size(), backend=backend)
    checkpointing = {
        None: None,
        "full": FullAC.Config(),
        "selective": SelectiveAC.Config(),
        2: ActivationCheckpoint(mode="selective"),
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
        plan=TinyPlan if isinstance(model, Tiny) else None,
    )
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert [step_comparison.unwrapped_name(name) for name, _ in model.named_parameters()] == names
    layers = len(block_list(model))
    assert sum(m._compiled_call_impl is not None for m in model.modules()) == (layers if compile else 0)
    sharded = loss_parallel and tp > 1

    def loss(logits, labels):
        assert isinstance(logits, DTensor) == sharded
        return step_comparison.summed_cross_entropy(logits, labels)

    batch = dims.get_optional_mesh("batch")
    context = on_shards if sharded else contextlib.nullcontext
    return step_comparison.Parallel(model, batch and batch.get_group(), loss, context)


def block_list(model):
    return model.layers if isinstance(model, Tiny) else model.model.layers


def case(options):
    options = dict(options)
    kind, tied = options.pop("kind", "transformer"), options.pop("tied", False)
    return step_comparison.Case(
        functools.partial(build, kind, tied),
        functools.partial(split, **options),
        # Without sequence parallelism the length need not be divisible.
        length=32 if options.get("sequence_parallel", True) and options.get("tp", 1) > 1 else 31,
        tolerance=step_comparison.BFLOAT16 if options.get("dtype") == "bfloat16" else step_comparison.FLOAT32,
    )


def test_a_step_equals_that_of_one_process():
    differences = step_comparison.equals_one_process(
        {name: case(options) for name, options in CASES.items()}, ranks=4
    )
    assert not differences
