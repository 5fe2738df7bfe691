"""The plan of FLA's transformer, and of its softmax attention in any hybrid model."""

from torch import nn

from titanplans import Plan, TPPlan, find_decoder, register_plan


@register_plan("transformer", mixer="fla.layers.attn.Attention")
class TransformerPlan(TPPlan):
    """Heads and MLP width are split, norms are replicated.

    The reduction is at the exit of mixer and MLP, not at `o_proj` and `down_proj`: FLA's attention pads the output after
    `o_proj`, and its MLP calls a fused kernel on the weight of `down_proj`.
    """

    def model_plan(self, model: nn.Module) -> Plan:
        plan, decoder = super().model_plan(model), find_decoder(model)
        # FLA's models take the sequence length from the tokens, or inside a mixer, but not from the embeddings.
        if decoder.embedding is not None:
            plan[decoder.embedding] = self.vocab_embedding(begins_stream=True)
        mixing = self._residual_mixing(model.get_submodule(decoder.base))
        return plan | {f"{decoder.base}.{name}".removeprefix("."): style for name, style in mixing.items()}

    def layer_plan(self, layer: nn.Module) -> Plan:
        return super().layer_plan(layer) | self._residual_mixing(layer)

    def attn_plan(self, attn: nn.Module) -> Plan:
        plan = {
            **self.attn_region(),
            "q_proj": self.colwise(),
            "k_proj": self.kv_colwise(attn),
            "v_proj": self.kv_colwise(attn),
            "o_proj": self.rowwise(reduce_output=False),
        }
        if attn.qk_norm:  # all heads share one weight
            plan |= {"q_norm": self.replicated_in_region(), "k_norm": self.replicated_in_region()}
        return plan

    def mlp_plan(self, mlp: nn.Module) -> Plan:
        return super().mlp_plan(mlp) | self.mlp_region() | {"down_proj": self.rowwise(reduce_output=False)}

    def _residual_mixing(self, module: nn.Module) -> Plan:
        """Plan attention over residuals (config.attnres_block_size), which works token by token on the stream."""
        names = ("attn_res_proj", "attn_res_norm", "mlp_res_proj", "mlp_res_norm", "res_proj", "res_norm")
        return {name: self.replicated_on_stream() for name in names if name in module._modules}
