"""Context parallelism through the one door: with each strategy, recomputed, compiled, offloaded, with adapters.

A step over ranks is that of one process.
"""

import functools

import equal
import torch
import torch.distributed as dist
import zoo

from titanplans.parallel import (
    DDPConfig,
    Degrees,
    FSDP2Config,
    Mesh,
    parallelize,
)

COMPILED = {"compile": {"enable": True, "backend": "aot_eager", "components": ["model"]}}
SHARED = Degrees(cp=2, dp_shard=2)
BOTH = Degrees(cp=2, tp=2, dp_shard=1)
CASES = {
    "qwen3, fsdp": ("qwen3", SHARED, {}),
    "gla, hsdp": ("gla", Degrees(cp=2, dp_replicate=2, dp_shard=1), {}),
    "gla, ddp": ("gla", Degrees(cp=2, dp_replicate=2, dp_shard=1), {"ddp": True}),
    "samba, cp 4": ("samba", Degrees(cp=4, dp_shard=1), {}),
    "gla, every block recomputed": ("gla", BOTH, {"activation_checkpoint": {"mode": "full"}}),
    "qwen3, by operator": (
        "qwen3", SHARED, {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    ),
    "rwkv7, every second block": ("rwkv7", SHARED, {"activation_checkpoint": {"mode": "selective"}}),
    "qwen3, all but the mixer": ("qwen3", BOTH, {"activation_checkpoint": {"mode": "keep_mixer"}}),
    "gla, the MLP, whole sequence": (
        "gla", BOTH, {"activation_checkpoint": {"mode": "mlp"}, "enable_sequence_parallel": False},
    ),
    "qwen3, gathered logits": ("qwen3", BOTH, {"disable_loss_parallel": True}),
    "qwen3, offloaded": ("qwen3", SHARED, {"enable_cpu_offload": True}),
    "qwen3, compiled": ("qwen3", SHARED, COMPILED),
    "gla, compiled": ("gla", BOTH, COMPILED),
    "qwen3, compiled, every block": ("qwen3", BOTH, COMPILED | {"activation_checkpoint": {"mode": "full"}}),
    "qwen3, compiled, the MLP": ("qwen3", SHARED, COMPILED | {"activation_checkpoint": {"mode": "mlp"}}),
    "gla, compiled, by memory budget": (
        "gla", SHARED, COMPILED | {"activation_checkpoint": {"mode": "memory_budget"}},
    ),
    "gla, compiled, ddp": ("gla", Degrees(cp=2, dp_replicate=2, dp_shard=1), {"ddp": True} | COMPILED),
}  # fmt: skip


def build(name):
    return zoo.build(name, dtype=torch.float32, options=False)


@functools.cache
def mesh_once(degrees):
    return Mesh(degrees, "cpu")


def split(model, degrees, options):
    from titanplans import kernels
    from titanplans.parallel import clip_gradients, cross_entropy

    kernels.install("cpu")
    options = dict(options)
    config = (DDPConfig if options.pop("ddp", False) else FSDP2Config)(**options)
    mesh = mesh_once(degrees)
    parallelize(model, parallel_dims=mesh, config=config)
    ranks = mesh.get_mesh("cp").get_group()

    def loss(logits, labels):
        own = cross_entropy(logits, labels, 1)
        whole = own.detach().clone()
        dist.all_reduce(whole, group=ranks)
        return own + (whole - own.detach())

    def norm(parameters):
        return clip_gradients(parameters, 1.0)

    return equal.Parallel(model, mesh.get_mesh("dp").get_group(), loss, norm=norm)


def case(name, degrees, options):
    parallelise = functools.partial(split, degrees=degrees, options=options)
    return equal.Case(functools.partial(build, name), parallelise, length=15)


def test_step_equals_single_process():
    differences = equal.equals_one_process({name: case(*given) for name, given in CASES.items()}, ranks=4)
    assert not differences, differences
