"""FLA's transformer and GLA, with every option that their configs have, equal to the unsharded model."""

from functools import partial

import pytest
import zoo
from plainly import verify
from tiny import Tiny, TinyPlan
from torch import nn

from titanplans import TPPlan, kernels, modeling

TRANSFORMER = {
    "plain": {},
    "grouped": dict(num_kv_heads=4),
    "qk_norm": dict(qk_norm=True),
    "biases": dict(qkv_bias=True),
    "window": dict(window_size=7),
    "tied": dict(tie_word_embeddings=True),
    "unfused": dict(fuse_norm=False, fuse_swiglu=False),
    "powlu": dict(hidden_act="powlu"),
    "padding": dict(pad_token_id=5),
    "residual mixing": dict(attnres_block_size=2, num_hidden_layers=2),
}
GLA = {
    "plain": {},
    "grouped": dict(num_kv_heads=4),
    "short convolutions": dict(use_short_conv=True),
    "ungated": dict(use_output_gate=False),
    "other gate": dict(hidden_act="swish", fuse_norm=False),
    "feature map": dict(feature_map="relu"),
    "clamped": dict(clamp_min=-0.3),
    "no affine": dict(elementwise_affine=False),
    "tied": dict(tie_word_embeddings=True),
    "unfused": dict(fuse_norm=False, fuse_swiglu=False),
    "residual mixing": dict(attnres_block_size=2, num_hidden_layers=2),
    "hybrid": dict(
        num_hidden_layers=2,
        attn=dict(layers=[1], num_heads=8, num_kv_heads=4, qkv_bias=True, window_size=None),
    ),
}
CASES = [("transformer", n, o) for n, o in TRANSFORMER.items()] + [("gla", n, o) for n, o in GLA.items()]


@pytest.fixture(autouse=True, scope="module")
def cpu_kernels():
    kernels.install("cpu")


def build(kind: str, options: dict) -> nn.Module:
    return zoo.build(kind, options=False, **{"num_hidden_layers": 1} | options)


@pytest.mark.parametrize("degree", [8, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("kind", "name", "options"), CASES, ids=[f"{k}-{n}" for k, n, _ in CASES])
def test_every_option_of_the_config(kind, name, options, degree):
    report = verify(partial(build, kind, options), degrees=[degree], loss_parallel=True)
    assert report.passed, report.table()


@pytest.mark.parametrize("tied", [False, True])
def test_the_form_that_users_write(tied):
    """attn_input with rowwise, biases in every projection, a norm over each head."""
    report = verify(partial(Tiny, tied), TinyPlan, degrees=[2, 4], seq_len=8)
    assert report.passed, report.table()


def test_positions_and_masks_come_from_whole_embeddings():
    """A model of transformers reads both off its embedding's output, which must not be a shard."""
    config = modeling.load_config("mistral", "debug", num_hidden_layers=1, sliding_window=5)

    class Plan(TPPlan):
        begins_stream = False

        def attn_plan(self, attn):
            projections = {"q_proj": self.colwise()} | {
                n: self.kv_colwise(attn) for n in ("k_proj", "v_proj")
            }
            return {**self.attn_input(), **projections, "o_proj": self.rowwise()}

        def vocab_embedding(self, *, begins_stream=False):
            return super().vocab_embedding(begins_stream=self.begins_stream)

    class AtTheEmbedding(Plan):
        begins_stream = True

    options = dict(degrees=[2], loss_parallel=True, sequence_parallel=True)
    assert verify(partial(modeling.build_real, config), Plan, **options).passed
    report = verify(partial(modeling.build_real, config), AtTheEmbedding, **options)
    assert not report.passed
    assert "model.layers.0" in report.table()


class SequenceFirst(nn.Module):
    """Attention over hidden states [sequence, batch, hidden]."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        # No bias on the keys: softmax cancels it, so its gradient would be nothing but rounding.
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(16, 16)

    def forward(self, hidden_states):
        q, k, v = (
            p(hidden_states).unflatten(-1, (-1, 4)).permute(1, 2, 0, 3)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.permute(2, 0, 1, 3).flatten(2))


def test_the_sequence_may_come_first():
    class Plan(TPPlan):
        def attn_plan(self, attn):
            projections = {name: self.colwise() for name in ("q_proj", "k_proj", "v_proj")}
            return {**self.attn_input(), **projections, "o_proj": self.rowwise()}

    def build():
        model = Tiny()
        for layer in model.layers:
            layer.attn = SequenceFirst()
        return model

    # 3 sequences: what is not the sequence need not be divisible.
    report = verify(build, Plan, degrees=[2, 4], sequence_dim=0, seq_len=8, batch_size=3)
    assert report.passed, report.table()
