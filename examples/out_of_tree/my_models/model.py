"""A language model that is not in transformers: linear attention, with a decay rate for each head."""

import torch
from torch import nn
from torch.nn import functional as F


class Mixer(nn.Module):
    """Linear attention with decay. `qkv_proj` is packed, `decay` has a value per head, and all heads share `norm`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.size = heads, width // heads
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.decay = nn.Parameter(torch.linspace(-4, 0, heads))
        self.norm = nn.RMSNorm(self.size)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (section.unflatten(-1, (-1, self.size)) for section in self.qkv_proj(x).chunk(3, -1))
        positions = torch.arange(x.shape[1], device=x.device)
        distance = (positions[:, None] - positions)[..., None]
        decays = (-self.decay.exp() * distance.clamp(min=0)).exp() * (distance >= 0)
        o = torch.einsum("bihd,bjhd,ijh,bjhe->bihe", q, k, decays.to(q.dtype), v)
        return self.o_proj(self.norm(o).flatten(2))


class MLP(nn.Module):
    """An MLP four times as wide as the model, without a gate."""

    def __init__(self, width: int):
        super().__init__()
        self.fc_in, self.fc_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc_out(F.gelu(self.fc_in(x)))


class Block(nn.Module):
    """A mixer and an MLP, each of them after a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mixer, self.mlp = Mixer(width, heads), MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.mixer_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class MyModel(nn.Module):
    """Maps token ids [batch, sequence] to logits [batch, sequence, vocabulary]."""

    model_type = "my_model"

    def __init__(self, vocabulary: int = 4096, width: int = 128, heads: int = 8, layers: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))
