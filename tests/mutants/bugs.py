"""Models and styles in which real bugs can be made again: as small as they can be, in the forms in which they were shipped.

What the corpus has already (tests/mutants/faults.py) is not repeated here.
"""

from typing import Any

import torch
from faulty import Install, installed
from tiny import MLP, Tiny, TinyPlan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from mutants.faults import scale_gradient
from titanplans import TPPlan
from titanplans.plan.plan import Plan
from titanplans.plan.styles.replicated import ReplicatedOnStream
from titanplans.plan.styles.vocab import VocabHead
from titanplans.split.parameters.local_parameters import readings_of
from titanplans.split.stream import Border

HEADS, WIDTH = 4, 16


def with_mixer(mixer: type[nn.Module]) -> nn.Module:
    """Return a Tiny whose blocks mix tokens by `mixer`."""
    model = Tiny()
    for layer in model.layers:
        layer.attn = mixer()
    return model


def changed(plan: type[TPPlan], **changes: Any) -> type[TPPlan]:
    """Return `plan` with styles replaced, by last part of the key: a function of the plan and of the old style."""

    class Changed(plan):  # type: ignore[misc, valid-type]
        def full_plan(self, model: nn.Module) -> Plan:
            return {
                key: changes[last](self, style) if (last := key.rpartition(".")[2]) in changes else style
                for key, style in super().full_plan(model).items()
            }

    return Changed


# Models.


class PackedMLP(MLP):
    """Gate and up in one matrix, the rows of one after those of the other: Phi's, Baichuan's W_pack."""

    def __init__(self):
        super().__init__()
        del self.gate_proj, self.up_proj
        self.gate_up_proj = nn.Linear(WIDTH, 2 * 24)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(nn.functional.silu(gate) * up)


def packed() -> nn.Module:
    model = Tiny()
    for layer in model.layers:
        layer.mlp = PackedMLP()
    return model


class PackedPlan(TinyPlan):
    """Splits the packed rows evenly: the first rank gets the gate, the last one gets up."""

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        return {**self.mlp_input(), "gate_up_proj": self.colwise(), "down_proj": self.rowwise()}


class Mixer(nn.Module):
    """Linear attention with a decay: o_t = q_t sum over s <= t of decay^(t - s) k_s v_s, by heads."""

    keys = 1
    """Keys per token and head; their rows come in the order (n h d), as those of FLA's gated DeltaProduct."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.k_proj = nn.Linear(WIDTH, self.keys * WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def decay(self, heads: int) -> torch.Tensor:
        return torch.full((heads,), 0.5, dtype=torch.float64)

    def forward(self, hidden_states):
        q, v = (p(hidden_states).unflatten(-1, (-1, WIDTH // HEADS)) for p in (self.q_proj, self.v_proj))
        k = self.k_proj(hidden_states).unflatten(-1, (self.keys, -1, WIDTH // HEADS))
        # The keys of a token are read one after the other, so that it matters which is which.
        k = sum((n + 1) * k[:, :, n] for n in range(self.keys))
        length, heads = q.shape[1], q.shape[2]
        age = torch.arange(length).view(-1, 1) - torch.arange(length)
        weight = self.decay(heads).view(-1, 1, 1) ** age.clamp_min(0) * (age >= 0)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * weight
        return self.o_proj(torch.einsum("bhts,bshd->bthd", scores, v).flatten(2))


class TwoKeys(Mixer):
    """Rows ordered (n h d): a contiguous share of them holds one key of all heads."""

    keys = 2


class LocalDecay(Mixer):
    """Each head has a decay by its number, as RetNet's has; a rank counts its own heads from 0."""

    def decay(self, heads: int) -> torch.Tensor:
        return 1 - 2.0 ** -(1 + torch.arange(heads, dtype=torch.float64))


class MixerPlan(TinyPlan):
    """All projections by contiguous rows."""

    def attn_plan(self, attn: nn.Module) -> Plan:
        split = {name: self.colwise() for name in ("q_proj", "k_proj", "v_proj")}
        return {**self.attn_input(), **split, "o_proj": self.rowwise()}


class Latent(Mixer):
    """Keys by way of a latent that all heads share, as in multi-head latent attention."""

    def __init__(self):
        super().__init__()
        self.k_proj = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False))


class LatentPlan(MixerPlan):
    """The shared projection as if every rank saw all heads."""

    def attn_plan(self, attn: nn.Module) -> Plan:
        plan = super().attn_plan(attn)
        del plan["k_proj"]
        return plan | {"k_proj.0": self.replicated_off_stream(), "k_proj.1": self.colwise()}


# Styles.


def counted_on_every_rank(style: ReplicatedOnStream) -> ParallelStyle:
    """A replica on each rank that is taken for a shard: a norm over all shards counts it once for each."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        right(module, border)
        readings = readings_of(module)
        for name, reading in readings.items():
            local = module._parameters[name].to_local().detach()  # type: ignore[union-attr, operator]
            shard = DTensor.from_local(local, border.mesh, (Shard(0),), run_check=False)
            module._parameters[name] = nn.Parameter(shard)
            readings[name] = reading._replace(gradient=(Shard(0),))

    return installed(style, install)


def drawn_on_every_rank(style: ReplicatedOnStream) -> ParallelStyle:
    """Each rank keeps what it drew itself."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        right(module, border)
        with torch.no_grad():
            for param in module._parameters.values():
                param.to_local().mul_(1 + 0.1 * border.rank)  # type: ignore[union-attr, operator]

    return installed(style, install)


def loss_over_ranks(style: VocabHead) -> ParallelStyle:
    """The loss is divided by the number of ranks before its backward, as if they held shards of the batch."""

    def install(right: Install, module: nn.Module, border: Border) -> None:
        module.register_forward_hook(
            lambda module, args, output: scale_gradient(output, 1 / border.mesh.size())
        )
        right(module, border)

    return installed(style, install)


class LeavesPlain(ParallelStyle):
    """A style of someone else that replicates by doing nothing."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module
