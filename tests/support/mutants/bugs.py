"""Styles that reproduce bugs of released libraries. Bugs that mutants/faults.py covers are not repeated here."""

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from tests.support.faulty_styles import Install, installed
from tests.support.mutants.faults import scale_gradient
from titanplans import TPPlan
from titanplans.plan.plan import Plan
from titanplans.split.border import Border
from titanplans.split.module_weight import local_specs
from titanplans.styles.replicated_on_stream import ReplicatedOnStream
from titanplans.styles.vocab_head import VocabHead


def changed(plan: type[TPPlan], **changes: Any) -> type[TPPlan]:
    """Return `plan` with some styles replaced.

    Args:
        plan: a class of plans.
        changes: functions (plan, old style) -> new style, by the last component of the key.
    """

    class Changed(plan):  # type: ignore[misc, valid-type]
        def full_plan(self, model: nn.Module) -> Plan:
            return {
                key: changes[last](self, style) if (last := key.rpartition(".")[2]) in changes else style
                for key, style in super().full_plan(model).items()
            }

    return Changed


def counted_on_every_rank(style: ReplicatedOnStream) -> ParallelStyle:
    """Label replicated parameters as shards, so that a norm over all shards counts them once for each rank."""

    def install(original: Install, module: nn.Module, border: Border) -> None:
        original(module, border)
        specs = local_specs(module)
        for name, spec in specs.items():
            local = module._parameters[name].to_local().detach()  # type: ignore[union-attr, operator]
            shard = DTensor.from_local(local, border.mesh, (Shard(0),), run_check=False)
            module._parameters[name] = nn.Parameter(shard)
            specs[name] = spec._replace(gradient=(Shard(0),))

    return installed(style, install)


def loss_over_ranks(style: VocabHead) -> ParallelStyle:
    """Divide the loss by the number of ranks before its backward, as if the ranks held shards of the batch."""

    def install(original: Install, module: nn.Module, border: Border) -> None:
        module.register_forward_hook(
            lambda module, args, output: scale_gradient(output, 1 / border.mesh.size())
        )
        original(module, border)

    return installed(style, install)
