"""Options that exclude each other are refused before any weight moves, by the entry and by the manager."""

from types import SimpleNamespace

import pytest
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.tensor import DTensor

from tests import zoo
from tests.support.refusals import refusal
from tests.support.tiny_model import Tiny, TinyPlan
from titanplans import kernels, modeling
from titanplans.parallel import (
    DDPConfig,
    Degrees,
    FSDP2Config,
    Mesh,
    ParallelError,
    parallelize,
)
from titanplans.proof.ranks.fake import fake_ranks

WORLD = 4
COMPILED = {"enable": True, "backend": "aot_eager", "components": ["model"]}
ASYNC_TP = {"compile": COMPILED | {"backend": "inductor"}, "enable_async_tensor_parallel": True}


def llama():
    return modeling.build(zoo.config("llama", num_attention_heads=4, num_key_value_heads=4))


def gla():
    kernels.install("cpu")
    return modeling.build(zoo.config("gla"))


def refused(config, degrees=None, model=llama, policy=None):
    with fake_ranks(WORLD):
        mesh = Mesh(degrees or Degrees(), "cpu")
        built = model()
        message = refusal(parallelize, built, parallel_dims=mesh, config=config, ac_config=policy)
    assert not any(isinstance(p, DTensor) for p in built.parameters())
    assert not any(isinstance(m, ActivationWrapper) or m._compiled_call_impl for m in built.modules())
    return message


TP = Degrees(tp=2)
CASES = {
    "with context_parallel_degree = 2 a rank has only some tokens": (
        FSDP2Config(float8={"recipe_name": "tensorwise", "emulate": True}), Degrees(cp=2),
    ),
    "compile.fullgraph = true: with context_parallel_degree = 2 the mixers": (
        FSDP2Config(compile=COMPILED | {"fullgraph": True}), Degrees(cp=2),
    ),
    "compiled blocks with context_parallel_degree = 2 are several graphs": (
        DDPConfig(compile=COMPILED, activation_checkpoint={"mode": "selective", "selective_ac_option": "op"}),
        Degrees(cp=2, dp_replicate=2, dp_shard=1),
    ),
    "pipeline_parallel_degree = 2": (FSDP2Config(), Degrees(pp=2)),
    "tensor_parallel_degree = 1 splits nothing": (FSDP2Config(plan=TinyPlan), None),
    "raise data_parallel_replicate_degree": (FSDP2Config(fsdp_defer_grad_sync="replicas"), None),
    "the model has 5 units": (FSDP2Config(fsdp_forward_prefetch=9), None),
    "sharded over 1 rank": (FSDP2Config(fsdp_forward_prefetch=1), Degrees(tp=4)),
    "enable_fsdp_symm_mem = true: it needs CUDA": (FSDP2Config(enable_fsdp_symm_mem=True), None),
    "no accelerator to pin for": (FSDP2Config(enable_cpu_offload=True, pin_cpu_memory=True), None),
    "ddp with tp = 2": (DDPConfig(), Degrees(tp=2, dp_replicate=2, dp_shard=1)),
    "ddp with dp_shard = 4": (DDPConfig(), None),
    'scope = "vision"': (FSDP2Config(activation_checkpoint={"mode": "full", "scope": "vision"}), TP),
    "is in no name of a Linear": (
        FSDP2Config(
            activation_checkpoint={
                "mode": "selective",
                "selective_ac_option": "op",
                "per_op_sac_force_recompute_mm_shapes_by_fqns": ["nothing"],
            }
        ),
        TP,
    ),
    "recomputes nothing of LlamaForCausalLM": (
        FSDP2Config(activation_checkpoint={"mode": "selective", "selective_ac_option": "3"}), TP,
    ),
    "enable_async_tensor_parallel = true: it needs tensor_parallel_degree above 1": (FSDP2Config(**ASYNC_TP), None),
    "enable_async_tensor_parallel = true: it needs CUDA with NCCL": (FSDP2Config(**ASYNC_TP), TP),
}  # fmt: skip


@pytest.mark.parametrize("message", CASES)
def test_refused_before_anything_moves(message):
    assert message in refused(*CASES[message])


def test_a_policy_of_torchtitan_has_the_same_limits():
    """docs/generated/combinations.md has the policies of titanplans that compile excludes."""
    theirs, compiled = SimpleNamespace(build=None), FSDP2Config(compile=COMPILED)
    assert "recomputing attention fails" in refused(compiled, TP, policy=theirs)
    assert "in which no operator can be kept" in refused(compiled, model=gla, policy=theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "nonsense"}, 'compile.backend = "nonsense": torch has '),
        ({"backend": "inductor", "options": {"nonsense": 1}}, "inductor does not know 'nonsense'"),
        ({"fullgraph": True, "components": ["optimizer"]}, "the optimizer step compiles to several graphs"),
    ],
)
def test_unknown_compile_options_are_refused(options, message):
    try:
        config = FSDP2Config(compile=COMPILED | options)
    except ParallelError as error:
        assert message in str(error)  # noqa: PT017  by itself, or else on its mesh
    else:
        assert message in refused(config)


def test_fullgraph_is_refused_with_kernels_outside_of_graphs():
    assert "whose kernels break every graph" in refused(
        FSDP2Config(compile=COMPILED | {"fullgraph": True}), model=gla
    )


def entry(model=Tiny, **changed):
    """Call the torchtitan-style entry with torchtitan's own configs."""
    case = dict(async_tp=False, sequence=True, compile=False, reshard="default") | changed
    with fake_ranks(WORLD):
        return parallelize(
            model(),
            parallel_dims=Mesh(Degrees(tp=case.get("tp", 1)), "cpu"),
            training=SimpleNamespace(
                mixed_precision_param="bfloat16", mixed_precision_reduce="float32", enable_cpu_offload=False
            ),
            parallelism=SimpleNamespace(
                enable_sequence_parallel=case["sequence"],
                fsdp_reshard_after_forward=case["reshard"],
                enable_fsdp_symm_mem=False,
            ),
            compile_config=SimpleNamespace(
                enable=case["compile"],
                components=["model"],
                backend="aot_eager",
                enable_async_tensor_parallel=case["async_tp"],
            ),
            ac_config=None,
            dump_folder="",
            plan=case.get("plan"),
        )


@pytest.mark.parametrize(
    ("message", "case"),
    [
        (
            "enable_async_tensor_parallel = true: it needs enable_sequence_parallel = true and compile.enable = true",
            dict(async_tp=True, sequence=False),
        ),
        ("needs compile.enable = true", dict(async_tp=True, tp=2)),
        ('needs compile.backend = "inductor"', dict(async_tp=True, tp=2, compile=True)),
        ("tensor_parallel_degree = 1 splits nothing", dict(plan=TinyPlan)),
        ("reshard_after_forward = 3", dict(reshard=3)),
    ],
)
def test_the_entry_refuses_the_same_options(message, case):
    assert message in refusal(entry, **case, kind=ParallelError)


def test_the_entry_takes_the_options_of_torchtitan():
    model = entry(tp=2, plan=TinyPlan, reshard=1)
    assert all(p.device_mesh.mesh_dim_names == ("dp_shard", "tp") for p in model.parameters())
