"""Context parallelism with `parallelize`: a step over ranks equals the step of one process.

Tested are hybrid models, token shifts, adapters and documents. For Qwen3 and GLA, `test_combinations` has every pair of
options.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from tests import zoo
from tests.support import process_groups, step_comparison
from titanplans.parallel import DDPConfig, Degrees, FSDP2Config, Mesh, parallelize

COMPILED = {"compile": {"enable": True, "backend": "aot_eager", "components": ["model"]}}
SHARED = Degrees(cp=2, dp_shard=2)
BOTH = Degrees(cp=2, tp=2, dp_shard=1)
CASES = {
    "samba, cp 4": ("samba", Degrees(cp=4, dp_shard=1), {}),
    "rwkv7, every second block": ("rwkv7", SHARED, {"activation_checkpoint": {"mode": "selective"}}),
    "gla, the MLP, whole sequence": (
        "gla", BOTH, {"activation_checkpoint": {"mode": "mlp"}, "enable_sequence_parallel": False},
    ),
    "qwen3, compiled, every block": ("qwen3", BOTH, COMPILED | {"activation_checkpoint": {"mode": "full"}}),
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

    def loss(logits, labels):
        return step_comparison.sum_over_cp(cross_entropy(logits, labels, 1), mesh)

    def norm(parameters):
        return clip_gradients(parameters, 1.0)

    return step_comparison.Parallel(model, mesh.get_mesh("dp").get_group(), loss, norm=norm)


def case(name, degrees, options):
    parallelise = functools.partial(split, degrees=degrees, options=options)
    return step_comparison.Case(functools.partial(build, name), parallelise, length=16)


def test_a_step_equals_that_of_one_process():
    differences = step_comparison.equals_one_process(
        {name: case(*arguments) for name, arguments in CASES.items()}, ranks=4
    )
    assert not differences, differences


def documents(rank):
    """Return three losses of packed documents for each model: unsplit, split, and split with a fused loss."""
    from titanplans import kernels
    from titanplans.loss import FusedLoss
    from titanplans.parallel import cross_entropy
    from titanplans.training.trainer.documents import inputs

    kernels.install("cpu")
    ids = torch.randint(96, (2, 14), generator=torch.Generator().manual_seed(2))
    labels, positions = ids.roll(-1, 1), torch.tensor([[*range(5), *range(9)], [*range(11), *range(3)]])
    losses = {}
    for name, by in {"gla": "cu_seqlens", "qwen3": "position_ids"}.items():
        batch = inputs(ids, positions, by)
        model = build(name)
        logits = model(**batch, use_cache=False).logits
        losses[name] = [step_comparison.summed_cross_entropy(logits, labels.view(logits.shape[:-1])).item()]
        parallelize(model, parallel_dims=mesh_once(Degrees(cp=2, dp_shard=1)), config=FSDP2Config())
        for _ in range(2):
            logits = model(**batch, use_cache=False).logits
            losses[name].append(cross_entropy(logits, labels.view(logits.shape[:-1]), 1).detach())
            with FusedLoss(model)(labels):
                logits = model(**batch, use_cache=False).logits
            losses[name].append(cross_entropy(logits, labels, 1).detach())
        for local_loss in losses[name][1:]:
            dist.all_reduce(local_loss)
    return losses


def test_documents_of_a_sequence_are_kept_apart():
    for name, (unsplit, *split) in process_groups.run(documents, 2).items():
        assert [loss.item() for loss in split] == pytest.approx([unsplit] * len(split), rel=1e-6), name
