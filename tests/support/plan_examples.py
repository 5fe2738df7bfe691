"""Tiny models for the styles of the plan language, and their correct plans. Tests put faults into subclasses of the plans.

A style that only one architecture uses is not here: tests/plans proves that architecture's plan.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.tiny_model import Tiny, TinyPlan

HIDDEN, HEADS, SIZE = 16, 4, 6
WIDTH = HEADS * SIZE


def with_mixer(mixer: type[nn.Module]) -> nn.Module:
    """Return a Tiny whose mixers are of class `mixer`."""
    model = Tiny()
    for layer in model.layers:
        layer.attn = mixer()
    return model


def with_mlp(mlp: type[nn.Module]) -> nn.Module:
    """Return a Tiny whose MLPs are of class `mlp`."""
    model = Tiny()
    for layer in model.layers:
        layer.mlp = mlp()
    return model


def causal(q, k, v, past=None):
    """Return causal linear attention of [batch, length, heads, size], whose scores decay by exp(past[i] - past[j])."""
    scores = torch.einsum("bihn,bjhn->bijh", q, k)
    later = ~torch.ones(scores.shape[1:3], dtype=torch.bool, device=scores.device).tril()[None, :, :, None]
    if past is not None:
        scores = scores * (past[:, :, None] - past[:, None]).masked_fill(later, 0).exp()
    return torch.einsum("bijh,bjhd->bihd", scores.masked_fill(later, 0), v)


class GatedNorm(nn.Module):
    """A norm over the width, applied to the gated product."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-5
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, gate):
        x = x * F.silu(gate)
        normed = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight
        return normed if self.bias is None else normed + self.bias


class StateSpace(nn.Module):
    """The structure of Mamba2: z | x | B | C | dt in one projection, two groups of B and C, a convolution of x | B | C."""

    def __init__(self, groups=2, state=3):
        super().__init__()
        self.num_heads, self.groups, self.state, self.width = HEADS, groups, state, WIDTH
        self.in_proj = nn.Linear(HIDDEN, 2 * WIDTH + 2 * groups * state + HEADS)
        self.conv1d = nn.Conv1d(
            channels := WIDTH + 2 * groups * state, channels, 2, groups=channels, padding=1
        )
        self.A_log, self.D, self.dt_bias = (nn.Parameter(torch.randn(HEADS)) for _ in range(3))
        self.norm = GatedNorm()
        self.out_proj = nn.Linear(WIDTH, HIDDEN)

    def forward(self, hidden_states):
        group = self.groups * self.state
        z, xbc, dt = self.in_proj(hidden_states).split(
            [self.width, self.width + 2 * group, self.num_heads], -1
        )
        xbc = self.conv1d(xbc.transpose(1, 2))[..., :-1].transpose(1, 2)
        x, b, c = xbc.split([self.width, group, group], -1)
        x = x.unflatten(-1, (self.num_heads, -1))
        b, c = (
            y.unflatten(-1, (self.groups, -1)).repeat_interleave(self.num_heads // self.groups, 2)
            for y in (b, c)
        )
        past = (-F.softplus(dt + self.dt_bias) * self.A_log.exp()).cumsum(1)
        o = causal(c, b, x, past) + self.D[:, None] * x
        return self.out_proj(self.norm(o.flatten(2), z))


class StateSpacePlan(TinyPlan):
    def attn_plan(self, attn):
        group = self.shared_heads(attn.groups * attn.state, attn.groups)
        return {
            **self.attn_region(),
            "in_proj": self.packed(WIDTH, WIDTH, group, group, HEADS),
            "conv1d": self.packed(WIDTH, group, group),
            "A_log": self.colwise(),
            "D": self.colwise(),
            "dt_bias": self.colwise(),
            "norm": self.split_norm(statistic=lambda x, gate: x * F.silu(gate)),
            "out_proj": self.rowwise(reduce_output=False),
        }

    def local_attributes(self, attn):
        groups = max(1, attn.groups // self.degree)
        channels = WIDTH // self.degree + 2 * groups * attn.state
        return self.divide_by_degree(attn, "num_heads", "width") | {
            "groups": groups,
            "conv1d.groups": channels,
        }


class Packed(nn.Module):
    """Queries, keys and values in one projection with weight [in, out], as in GPT-2, with norms over their full widths."""

    def __init__(self, kv=2):
        super().__init__()
        self.num_heads, self.num_kv_heads = HEADS, kv
        self.c_attn = Transposed(HIDDEN, (HEADS + 2 * kv) * SIZE)
        self.q_norm, self.k_norm, self.o_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(kv * SIZE), nn.LayerNorm(WIDTH)
        self.c_proj = Transposed(WIDTH, HIDDEN)

    def forward(self, hidden_states):
        kv = self.num_kv_heads * SIZE
        q, k, v = self.c_attn(hidden_states).split([self.num_heads * SIZE, kv, kv], -1)
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, SIZE)).transpose(1, 2) for x in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(self.o_norm(o.transpose(1, 2).flatten(2)))


class PackedPlan(TinyPlan):
    def attn_plan(self, attn):
        kv = attn.num_kv_heads
        return {
            **self.attn_input(),
            "c_attn": self.packed(WIDTH, *[self.shared_heads(kv * SIZE, kv)] * 2, dim=1),
            "q_norm": self.split_norm(),
            "k_norm": self.split_norm(heads=kv, rows=kv * SIZE),
            "o_norm": self.gathered_in_region(),
            "c_proj": self.rowwise(dim=0),
        }

    def local_attributes(self, attn):
        kv = max(1, attn.num_kv_heads // self.degree)
        return self.divide_by_degree(attn, "num_heads") | {"num_kv_heads": kv}


class Transposed(nn.Module):
    """transformers' Conv1D: a Linear with weight [in, out], whose forward needs the bias."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) / 4),
            nn.Parameter(torch.randn(outputs)),
        )

    def forward(self, x):
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight).unflatten(0, x.shape[:2])


class Selective(nn.Module):
    """The structure of Mamba: a low-rank projection with a bias maps all channels to the step size dt of each channel."""

    def __init__(self):
        super().__init__()
        self.width, self.rank, self.state = WIDTH, 3, 2
        self.in_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.x_proj = nn.Linear(WIDTH, self.rank + 2 * self.state)
        self.dt_proj = nn.Linear(self.rank, WIDTH)
        self.A_log = nn.Parameter(torch.randn(WIDTH, self.state))
        self.out_proj = nn.Linear(WIDTH, HIDDEN)

    def forward(self, hidden_states):
        x = self.in_proj(hidden_states)
        dt, b, c = self.x_proj(x).split([self.rank, self.state, self.state], -1)
        past = (-F.softplus(self.dt_proj(dt)) * self.A_log.exp().sum(-1)).cumsum(1)
        b, c = (y[:, :, None].expand(-1, -1, x.shape[-1], -1) for y in (b, c))
        return self.out_proj(causal(c, b, x[..., None], past)[..., 0])


class SelectivePlan(TinyPlan):
    def attn_plan(self, attn):
        return {
            **self.attn_input(),
            "in_proj": self.colwise(),
            "x_proj": self.rowwise_in_region(),
            "dt_proj": self.colwise(),
            "A_log": self.colwise(),
            "out_proj": self.rowwise(),
        }

    def heads(self, attn):
        return {"width": attn.width}


def decays(heads, device):
    """Return the log decay of each head, which depends on the head's index."""
    return torch.log1p(-(2.0 ** (-1.0 - torch.arange(heads, dtype=torch.float64, device=device))))


class Retention(nn.Module):
    """RetNet's decay by head index, with two keys per token, in rows (n h d) of k_proj as in gated_deltaproduct."""

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.q_proj, self.v_proj = (nn.Linear(HIDDEN, WIDTH, bias=False) for _ in range(2))
        self.k_proj = nn.Linear(HIDDEN, 2 * WIDTH, bias=False)
        self.scale = nn.Parameter(torch.randn(HIDDEN))
        self.o_proj = nn.Linear(WIDTH, HIDDEN)

    def forward(self, hidden_states):
        hidden_states = hidden_states * self.scale
        q, v = (proj(hidden_states).unflatten(-1, (-1, SIZE)) for proj in (self.q_proj, self.v_proj))
        k = self.k_proj(hidden_states).unflatten(-1, (2, -1, SIZE)).prod(2)
        steps = torch.arange(q.shape[1], device=q.device)[:, None]
        past = (steps * decays(q.shape[2], q.device)).to(q.dtype).expand(len(q), -1, -1)
        return self.o_proj(causal(q, k, v, past).flatten(2))


def decays_of_rank(decays, ranks):
    """Return a function like `decays` for the heads of this rank, which keep their indices in the unsplit model."""

    def local(heads, device):
        return decays(heads * ranks.degree, device).narrow(0, heads * ranks.rank, heads)

    return local


class RetentionPlan(TinyPlan):
    def attn_plan(self, attn):
        return {
            **self.attn_input(may_gather=True),  # the mixer's code scales hidden states by a vector
            "scale": self.replicated_in_region(),
            "q_proj": self.colwise(),
            "k_proj": self.packed(WIDTH, WIDTH),
            "v_proj": self.colwise(),
            "o_proj": self.rowwise(),
        }

    def local_functions(self, attn):
        return {"decays": decays_of_rank}


class ReplicatedMixerPlan(TinyPlan):
    """Replicates the mixer, and splits the MLP."""

    def attn_plan(self, attn):
        return self.unsplit(attn)


class Router(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, HIDDEN))

    def forward(self, x):
        return F.linear(x, self.weight).softmax(-1)


class Experts(nn.Module):
    """Experts in three-dimensional weights with biases, gate and up packed, and a shared expert."""

    def __init__(self, experts=3, width=8):
        super().__init__()
        self.router = Router(experts)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, HIDDEN) / 4)
        self.gate_up_bias = nn.Parameter(torch.randn(experts, 2 * width))
        self.down_proj = nn.Parameter(torch.randn(experts, HIDDEN, width) / 4)
        self.down_bias = nn.Parameter(torch.randn(experts, HIDDEN))
        self.shared_up, self.shared_down = nn.Linear(HIDDEN, width), nn.Linear(width, HIDDEN)

    def forward(self, x):
        weights = self.router(x)
        top, chosen = weights.topk(2, -1)
        weights = torch.zeros_like(weights).scatter(-1, chosen, top)
        self.balance = weights.mean((0, 1)).square().sum()
        out = self.shared_down(F.silu(self.shared_up(x)))
        for expert in range(len(self.router.weight)):
            gate, up = F.linear(x, self.gate_up_proj[expert], self.gate_up_bias[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert], self.down_bias[expert])
            out = out + weights[..., expert, None] * y
        return out


def balance_of(layers):
    """Return the load-balancing loss of `layers`."""
    return sum(layer.mlp.balance for layer in layers)


class Balanced(Tiny):
    """Multiplies every logit by 1 + its load-balancing loss, so that a proof sees its gradient."""

    def forward(self, input_ids, **kwargs):
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits * (1 + balance_of(self.layers))
        return output


def balanced():
    """Return a `Balanced` whose MLPs are mixtures of experts."""
    model = Balanced()
    for layer in model.layers:
        layer.mlp = Experts()
    return model


class ExpertsPlan(TinyPlan):
    def mlp_plan(self, mlp):
        width = mlp.down_proj.shape[2]
        return {
            **self.mlp_region(),
            "router": self.replicated_in_region(),
            "gate_up_proj": self.packed(width, width, dim=1),
            "gate_up_bias": self.packed(width, width, dim=1),
            "down_proj": self.rowwise(reduce_output=False, dim=2),
            "down_bias": self.added_to_sum(),
            "shared_up": self.colwise(),
            "shared_down": self.rowwise(reduce_output=False),
        }

    def model_functions(self, model):
        return {"balance_of": self.count_once} if isinstance(model, Balanced) else {}


class QKV(nn.Module):
    """Queries, keys and values in one Linear, as in Phi-3."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.odd = HEADS, 4, 3
        self.qkv_proj, self.o_proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden_states):
        q, k, v = (x.unflatten(-1, (-1, 4)) for x in self.qkv_proj(hidden_states).chunk(3, -1))
        return self.o_proj(causal(q, k, v).flatten(2))


class Unsized(QKV):
    """Like `QKV`, but without an attribute for the head size: a plan has to compute it."""

    def __init__(self):
        super().__init__()
        del self.head_dim


class QKVPlan(TinyPlan):
    def attn_plan(self, attn):
        qkv = self.packed(HIDDEN, HIDDEN, HIDDEN)
        return {**self.attn_input(), "qkv_proj": qkv, "o_proj": self.rowwise()}


class GateUp(nn.Module):
    """Gate and up in one Linear, as in Phi-3."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(HIDDEN, 48), nn.Linear(24, HIDDEN)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class GateUpPlan(TinyPlan):
    mlp_in = ()

    def mlp_plan(self, mlp):
        return super().mlp_plan(mlp) | {"gate_up_proj": self.packed(24, 24)}
