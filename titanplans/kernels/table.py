"""The table of CPU replacements: "module:name" of a function or autograd.Function of FLA -> its reference.

A reference takes the same arguments (for a Function, those of `apply`) and is differentiated by torch. For a recurrence it
is a `Recurrence`, a formula; for a form of attention a `Naive`, FLA's own reference in `fla/ops/*/naive.py`.
"""

from collections.abc import Callable
from typing import Any

from titanplans.kernels import precision
from titanplans.kernels.attention import attention, attention_parts, decoding, rotary
from titanplans.kernels.layers import activations, convolution, losses, norms, residuals
from titanplans.kernels.naive import Naive
from titanplans.kernels.recurrent import (
    formulas,
    gates,
    log_linear,
    mamba3,
    recurrence,
    rwkv,
    state_space,
)
from titanplans.kernels.recurrent.recurrence import Recurrence

_FLASH_ATTENTION = {
    # The modules import flash-attn, which may be absent: then the names are None, or missing.
    f"fla.{module}:{function.__name__}": function
    for module in (
        *(f"layers.{name}" for name in ("attn", "bitattn", "mla", "moba", "rodimus")),
        *(f"ops.{name}" for name in ("deltaformer.parallel", "nsa.naive", "nsa.parallel", "moba.parallel")),
    )
    for function in (attention.flash_attn_func, attention.flash_attn_varlen_func)
}

FORMULAS = {
    "abc": (formulas.gsa, "chunk"),
    "comba": (formulas.comba, "chunk", "fused_recurrent"),
    "cyfa": (formulas.cyfa, "chunk", "fused_recurrent"),
    "delta_rule": (formulas.delta_rule, "chunk", "fused_recurrent"),
    "gated_delta_product": (formulas.gated_delta_product, "chunk"),
    "gated_delta_rule": (formulas.delta_rule, "chunk", "fused_recurrent"),
    "gla": (formulas.gla, "chunk", "fused_recurrent"),
    "gsa": (formulas.gsa, "chunk", "fused_recurrent"),
    "hgrn": (formulas.hgrn, "chunk", "fused_recurrent"),
    "kda": (formulas.delta_rule, "chunk", "fused_recurrent"),
    "mesa_net": (formulas.mesa_net, "chunk"),
    "path_attn": (formulas.path_attn, "parallel"),
    "precond_gated_delta_rule": (formulas.preconditioned, "chunk", "fused_recurrent"),
    "precond_kda": (formulas.preconditioned, "chunk", "fused_recurrent"),
    "rwkv6": (rwkv.rwkv6, "chunk", "fused_recurrent"),
    "rwkv7": (rwkv.rwkv7, "chunk"),
    "simple_gla": (formulas.simple_gla, "chunk", "fused_chunk", "fused_recurrent", "parallel"),
}
"""Maps a folder of fla.ops to a formula, and to the kinds of kernels that the formula replaces: `chunk_delta_rule`, ..."""

_ATTENTION = {
    f"fla.ops.{place}": Naive(f"fla.ops.{reference}", attention_parts.check_nsa if "nsa" in place else None)
    for place, reference in {
        "attn.parallel:parallel_attn": "attn.naive:naive_parallel_attn",
        "forgetting_attn.parallel:parallel_forgetting_attn": "forgetting_attn.naive:naive_forgetting_attn",
        "nsa.parallel:parallel_nsa": "nsa.naive:naive_nsa",
        "parallax.parallel:parallel_parallax": "parallax.naive:naive_parallax",
        "stickbreaking_attn.parallel:parallel_stickbreaking_attn": "stickbreaking_attn.naive:naive_stickbreaking_attn",
        "wall_attn.parallel:parallel_wall_attn": "wall_attn.naive:naive_wall_attn",
    }.items()
}

Reference = Callable[..., Any] | Recurrence | Naive

_WRAPPERS: dict[str, Reference] = {
    **_FLASH_ATTENTION,
    "fla.layers.mamba:Mamba.slow_forward": state_space.mamba_forward,
    "fla.layers.mamba2:Mamba2.torch_forward": state_space.mamba2_forward,
    "fla.layers.log_linear_mamba2:LogLinearMamba2.forward": log_linear.log_linear_mamba2_forward,
    "fla.layers.mamba3:Mamba3.forward": mamba3.mamba3_forward,
    "fla.layers.mamba3:mamba3_siso_combined": mamba3.siso,
    "fla.layers.mamba3:mamba3_mimo_combined": mamba3.mimo,
    "fla.layers.rodimus:autocast_to_fp16": precision.any_dtype,
    "fla.layers.stickbreaking_attn:StickBreakingAttention.forward": attention_parts.stickbreaking_module,
    "fla.models.cat.modeling_cat:create_block_mask_compiled": attention_parts.create_block_mask,
    "fla.models.cat.modeling_cat:flex_attention_compiled": attention_parts.flex_attention,
    "fla.modules.fused_cross_entropy.ops:FusedCrossEntropyLoss.forward": losses.fused_cross_entropy_module,
    "fla.ops.moba.parallel:parallel_moba": attention_parts.parallel_moba,
    "fla.ops.nsa.naive:naive_nsa_selection": attention_parts.nsa_selection,
}
"""References of functions of other packages and of torch, and of wrappers that refuse a CPU."""

REFERENCES: dict[str, Reference] = {
    "fla.modules.norm.layernorm:LayerNormFunction": norms.layer_norm,
    "fla.modules.norm.layernorm:LayerNormLinearFunction": norms.layer_norm_linear,
    "fla.modules.norm.fused_norm_gate:LayerNormGatedFunction": norms.layer_norm_gated,
    "fla.modules.norm.fused_norm_gate:LayerNormGatedLinearFunction": norms.layer_norm_gated_linear,
    "fla.modules.norm.layernorm_gated:LayerNormFn": norms.gated_layer_norm,
    "fla.modules.norm.l2norm:L2NormFunction": norms.l2norm,
    "fla.modules.activations.ops:SigmoidFunction": activations.sigmoid,
    "fla.modules.activations.ops:LogSigmoidFunction": activations.logsigmoid,
    "fla.modules.activations.ops:SwishFunction": activations.swish,
    "fla.modules.activations.ops:ELUPlusOneFunction": activations.elu_plus_one,
    "fla.modules.activations.ops:GeLUFunction": activations.bias_gelu,
    "fla.modules.activations.ops:FastGeLUFunction": activations.gelu,
    "fla.modules.activations.ops:SquaredReLUFunction": activations.squared_relu,
    "fla.modules.activations.ops:SwiGLUFunction": activations.swiglu,
    "fla.modules.activations.ops:SwiGLULinearFunction": activations.swiglu_linear,
    "fla.modules.activations.ops:PowGLUFunction": activations.powglu,
    "fla.modules.activations.ops:PowGLULinearFunction": activations.powglu_linear,
    "fla.modules.causal_conv1d.ops:CausalConv1dFunction": convolution.causal_conv1d,
    "fla.modules.causal_conv1d.ops:causal_conv1d_update": convolution.causal_conv1d_update,
    "fla.modules.causal_conv1d.ops:causal_conv1d_update_states": convolution.causal_conv1d_update_states,
    "fla.modules.rotary.ops:RotaryEmbeddingFunction": rotary.rotary_embedding,
    "fla.modules.fused_cross_entropy.ops:cross_entropy_loss": losses.cross_entropy_loss,
    "fla.modules.fused_linear_cross_entropy.ops:fused_linear_cross_entropy_loss": losses.fused_linear_cross_entropy_loss,
    "fla.modules.token_shift:TokenShift": rwkv.token_shift,
    "fla.ops.rwkv7.fused_recurrent:fused_mul_recurrent_rwkv7": Recurrence(rwkv.rwkv7_mul),
    "fla.ops.rwkv7.fused_addcmul:Rwkv7FusedAddcmul": rwkv.addcmul,
    "fla.ops.rwkv7.fused_k_update:KUpdateFunction": rwkv.k_update,
    "fla.ops.rwkv7.gate_output_correction:GateOutputCorrection": rwkv.gate_output_correction,
    "fla.ops.log_linear_attn.chunk:chunk_log_linear_attn": log_linear.chunk_log_linear_attn,
    "fla.ops.attnres.fused:fused_attnres": residuals.fused_attnres,
    "fla.ops.utils.cumsum:chunk_global_cumsum": gates.chunk_global_cumsum,
    "fla.modules.norm.layernorm_quant:LayerNormLinearQuantFunction": norms.layer_norm_linear_quant,
    "fla.ops.gsa.gate:fused_additive_gate": gates.fused_additive_gate,
    "fla.ops.utils.pooling:MeanPoolingFunction": attention_parts.mean_pooling,
    **_WRAPPERS,
    **_ATTENTION,
    "fla.ops.deltaformer.parallel:ParallelDeltaformerFunction": attention_parts.deltaformer_values,
    "fla.ops.parallax.decode:parallax_decode": decoding.parallax_decode,
    "fla.ops.parallax.decode:parallax_decode_one_step": decoding.parallax_decode,
    "fla.ops.wall_attn.decode:parallel_wall_attn_decode": decoding.parallel_wall_attn_decode,
    "fla.ops.kda.gate:fused_kda_gate": recurrence.gate,
    "fla.ops.mesa_net.decoding_one_step:mesa_net_decoding_one_step": decoding.mesa_net_step,
    "fla.ops.attn.decoding:attn_decoding_one_step": decoding.attn_decoding_one_step,
    **{
        f"fla.ops.{folder}.{kind}:{kind}_{folder}": Recurrence(formula)
        for folder, (formula, *kinds) in FORMULAS.items()
        for kind in kinds
    },
}
"""Maps a name in FLA, "module:name", to the replacement for CPU tensors."""

NOT_TRITON = frozenset(_WRAPPERS)
"""Keys of `REFERENCES` whose originals are not Triton kernels of FLA."""
