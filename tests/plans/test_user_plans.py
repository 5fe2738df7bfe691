"""Plans as users write them, for models with unusual structure."""

from functools import partial

from torch import nn

from tests.support.plain_proofs import verify_plain, verify_sharded
from tests.support.tiny_model import Tiny
from titanplans import TPPlan, modeling


def test_positions_and_masks_are_derived_from_full_embeddings():
    """Models of transformers derive positions and masks from the embedding's output, which must not be a shard."""
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

    assert verify_sharded(partial(modeling.build_real, config), Plan).passed
    report = verify_sharded(partial(modeling.build_real, config), AtTheEmbedding)
    assert not report.passed
    assert "model.layers.0" in report.table()


class SequenceFirst(nn.Module):
    """Attention over hidden states [sequence, batch, hidden]."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        # No bias on the keys, because softmax cancels it and its gradient would be only a rounding error.
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(16, 16)

    def forward(self, hidden_states):
        q, k, v = (
            p(hidden_states).unflatten(-1, (-1, 4)).permute(1, 2, 0, 3)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(o.permute(2, 0, 1, 3).flatten(2))


def test_the_sequence_dimension_may_come_first():
    class Plan(TPPlan):
        def attn_plan(self, attn):
            projections = {name: self.colwise() for name in ("q_proj", "k_proj", "v_proj")}
            return {**self.attn_input(), **projections, "o_proj": self.rowwise()}

    def build():
        model = Tiny()
        for layer in model.layers:
            layer.attn = SequenceFirst()
        return model

    # 3 sequences, because only the sequence dimension has to be divisible.
    report = verify_plain(build, Plan, degrees=[2, 4], sequence_dim=0, seq_len=8, batch_size=3)
    assert report.passed, report.table()
