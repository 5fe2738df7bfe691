"""What `check_cpu` reads off the code against what happens: every family of FLA is run on the CPU."""

import pytest
import torch
import worlds
import zoo
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from titanplans import modeling
from titanplans.kernels import KernelError, check_cpu, install

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "intermediate_size": 128}
# Fields without which a family does not take these sizes, or is a large model.
OPTIONS = {
    "hgrn2": {"expand_ratio": 16},
    "mamba2": {"num_heads": 4, "head_dim": 32},
    "log_linear_mamba2": {"num_heads": 4, "head_dim": 32},
    "mamba3": {"num_heads": 4, "head_dim": 32},
    "nsa": {"hidden_size": 256, "num_heads": 16, "num_kv_heads": 1},
    "rodimus": {
        "residual_in_fp32": False,
        "ska_attn": {
            "num_heads": 4,
            "qkv_bias": False,
            "qk_norm": False,
            "window_size": 16,
            "rope_theta": 1e4,
        },
    },
    **{
        kind: {"head_dim": 16}
        for kind in ("comba", "gated_deltanet", "gated_deltaproduct", "kda", "mesa_net", "mom")
    },
    **{kind: {"head_dim": 16} for kind in ("precond_gated_deltanet", "precond_kda")},
    "cyclic_flow_attention": {"head_dim": 16, "num_slots": 8},
    "rwkv7": {"head_dim": 32},
    "yoco": {"num_self_decoder_layers": 1, "self_decoder_attn": {"head_dim": 16}},
    "samba": {
        "hidden_size": 144,
        "attn": {"layers": [1], "num_heads": 4, "num_kv_heads": 4, "window_size": 16},
    },
}
PROVED = {"gla", "transformer", *zoo.FAMILIES}
"""A plan of theirs is proved on a CPU."""


def families():
    import fla.models

    names = [name for name in fla.models.__all__ if name.endswith("Config")]
    return sorted({getattr(fla.models, name).model_type for name in names})


@pytest.fixture(autouse=True, scope="module")
def _installed():
    install("cpu")


def build(kind, **options):
    import fla.models  # noqa: F401  # its model types

    fields = (
        SIZES
        | ({} if kind in ("hgrn2", "mamba", "rwkv7", "samba") else {"num_heads": 4})
        | OPTIONS.get(kind, {})
    )
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(fields | options)))


def failure(model):
    """What a training step fails with, in a dtype that the kernels take; None if it does not."""
    tokens = torch.randint(0, 128, (1, 70), generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        try:
            model.to(dtype)(input_ids=tokens, labels=tokens).loss.backward()
        except (RuntimeError, ValueError, TypeError, AssertionError, ImportError) as error:
            failed = f"{type(error).__name__}: {error}"
            if "bf16" in failed or "bfloat16" in failed:
                continue
            return failed
        else:
            return None
    raise AssertionError(failed)


@pytest.mark.parametrize("kind", families())
def test_the_answer_is_what_happens(kind):
    model = build(kind)
    failed = failure(model)
    if kind in PROVED:
        assert failed is None
        check_cpu(model)
        return
    # Triton, three families' own checks, flash-attn, FlexAttention; log_linear_mamba2 gives no reason.
    reasons = ("active drivers", "CUDA", "flash-attn", "FlexAttention", "NotImplementedError: ")
    assert any(reason in failed for reason in reasons), failed
    with pytest.raises(KernelError, match=f"model_type '{kind}' does not run on a CPU: ") as refusal:
        check_cpu(model)
    assert "\n" not in str(refusal.value)


def without_stand_in():
    """A gla model with a mixer of FLA's that no model of FLA's has, so that nothing stands in for its kernels."""
    from fla.layers.rebased import ReBasedLinearAttention

    with torch.device("meta"):
        model = build("gla")
        model.model.layers[1].attn = ReBasedLinearAttention(64, num_heads=4)
    return model


def test_the_refusal_names_module_function_and_kernel_and_needs_no_memory(monkeypatch):
    with pytest.raises(
        KernelError,
        match=r"'gla'.*ReBasedLinearAttention calls \w+, which needs the Triton kernel \w+_kernel.*GPUs",
    ):
        check_cpu(without_stand_in())
    monkeypatch.setattr("fla.layers.moba.flash_attn_varlen_func", None)
    with pytest.raises(KernelError, match=r"MoBA calls flash_attn_varlen_func, which needs flash-attn,"):
        check_cpu(build("moba"))


@pytest.mark.parametrize("options", [{}, {"attn": {"layers": [1], "num_heads": 8}, "use_short_conv": True}])
@pytest.mark.parametrize("attnres", [None, 2])
def test_what_is_replaced_ends_the_search(options, attnres):
    check_cpu(modeling.build(modeling.load_config("gla", "debug", **options, attnres_block_size=attnres)))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3"])
def test_models_of_transformers_run_anywhere(name):
    check_cpu(modeling.build(modeling.load_config(name, "debug")))


def test_transformers_own_mamba_is_not_flas():
    import transformers

    with torch.device("meta"):
        check_cpu(
            transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=64, num_hidden_layers=1))
        )


def test_without_install_the_remedy_is_install():
    # A process of its own: in this one it is installed.
    assert "needs kernels.install('cpu') before" in worlds.run(check_without_install, 1)


def check_without_install(rank):
    check_cpu(modeling.build(modeling.load_config("llama", "debug")))
    with pytest.raises(KernelError) as refusal:
        check_cpu(modeling.build(modeling.load_config("gla", "debug")))
    return str(refusal.value)
