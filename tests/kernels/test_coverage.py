"""`check_cpu`: every family of FLA runs on a CPU, and a kernel without a stand-in is named."""

import pytest
import torch

from tests import zoo
from tests.support import process_groups
from tests.support.refusals import refusal
from titanplans import modeling
from titanplans.kernels import KernelError, check_cpu

pytestmark = pytest.mark.usefixtures("cpu_kernels")


def families():
    import fla.models

    names = [name for name in fla.models.__all__ if name.endswith("Config")]
    return sorted({getattr(fla.models, name).model_type for name in names})


@pytest.mark.parametrize("kind", families())
def test_every_family_of_fla_runs_on_a_cpu(kind):
    """Both lengths are run, because several families use other kernels for more than 64 tokens. Proofs check the
    values."""
    model = zoo.build(kind, dtype=torch.float32)
    check_cpu(model)
    model(**zoo.inputs(kind, seq_len=70), use_cache=False).logits.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def without_stand_in():
    """Return a gla model with an FLA mixer that no FLA model uses, so its kernels have no stand-in."""
    from fla.layers.rebased import ReBasedLinearAttention

    with torch.device("meta"):
        model = modeling.build(zoo.config("gla"))
        model.model.layers[1].attn = ReBasedLinearAttention(64, num_heads=4)
    return model


def test_the_refusal_names_module_function_and_kernel_and_needs_no_memory(monkeypatch):
    with pytest.raises(
        KernelError,
        match=r"'gla'.*ReBasedLinearAttention calls \w+, .*Triton kernel \w+_kernel",
    ):
        check_cpu(without_stand_in())
    monkeypatch.setattr("fla.layers.moba.flash_attn_varlen_func", None)
    with pytest.raises(KernelError, match=r"MoBA calls flash_attn_varlen_func, .*flash-attn,"):
        check_cpu(modeling.build(zoo.config("moba")))


@pytest.mark.parametrize("options", [{}, {"attn": {"layers": [1], "num_heads": 8}, "use_short_conv": True}])
@pytest.mark.parametrize("attnres", [None, 2])
def test_modules_with_stand_ins_are_not_searched_further(options, attnres):
    check_cpu(modeling.build(modeling.load_config("gla", "debug", **options, attnres_block_size=attnres)))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gemma3"])
def test_models_of_transformers_run_on_a_cpu(name):
    check_cpu(modeling.build(modeling.load_config(name, "debug")))


def test_the_mamba_of_transformers_is_not_that_of_fla():
    import transformers

    with torch.device("meta"):
        check_cpu(
            transformers.MambaForCausalLM(transformers.MambaConfig(hidden_size=64, num_hidden_layers=1))
        )


def test_without_install_the_error_says_to_install():
    # In a new process, because the stand-ins are installed in this one.
    assert "needs kernels.install('cpu') before" in process_groups.run(check_without_install, 1)


def check_without_install(rank):
    check_cpu(modeling.build(modeling.load_config("llama", "debug")))
    return refusal(check_cpu, modeling.build(modeling.load_config("gla", "debug")), kind=KernelError)
