"""The plan of CAT, compress and attend transformers (Prakash et al. 2025, arXiv:2511.05313)."""

from torch import nn

from titanplans import Plan, PlanError, find_decoder, register_plan

from .mixer import MixerPlan


@register_plan("cat", mixer="fla.models.cat.modeling_cat.CATDecoderAttention")
class CATPlan(MixerPlan):
    """The decoder is split. The compressor, which compresses the tokens of each earlier chunk, runs unsplit on every rank.

    The model arranges the chunks before the blocks and separates them after the blocks. Every rank does this for all
    chunks.
    """

    by_head = ("q_proj",)
    by_shared_head = ("k_proj", "v_proj")
    replicated = ("q_norm", "k_norm")
    counts = ("num_heads", "hidden_size")

    def model_plan(self, model: nn.Module) -> Plan:
        if (shards := self.options.shards) > 2:
            cp = self.options.degrees.cp
            remedy = "set sequence_parallel = False" if cp <= 2 else "set context_parallel_degree to 1 or 2"
            raise PlanError(
                "CAT turns a sequence into chunks * (chunk_size + 2) + 2 tokens, which can't be sharded equally over "
                f"{shards} ranks for every chunk size: {remedy}"
            )
        plan, base = super().model_plan(model), find_decoder(model).base
        separators = [f"{base}.{name}" for name in ("separator", "adaptive_token")]
        embeddings = [f"{base}.{name}" for name in ("embeddings", "compressor.wte")]
        return {
            **plan,
            **self.each_of(model, f"{base}.compressor", self.replicated_off_stream()),
            **{name: self.replicated_off_stream() for name in separators},
            **{name: self.vocab_embedding() for name in embeddings},
            f"{base}.norm": self.end_of_stream(may_gather=True),
        }

    def local_attributes(self, attn: nn.Module) -> dict[str, int]:
        kv = self.heads_per_rank(attn.num_kv_heads)  # type: ignore[arg-type]
        return super().local_attributes(attn) | {"num_kv_heads": kv}
