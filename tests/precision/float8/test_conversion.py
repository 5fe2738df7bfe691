"""Conversion to float8: which modules are converted or skipped, and errors before any module changes."""

import importlib.util

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from titanplans import kernels, modeling
from titanplans.extras import MissingLibrary
from titanplans.parallel import Float8, FSDP2Config, ParallelError, convert_to_float8
from titanplans.precision.float8.conversion import SMALL, check_calls, refuse_read_weights
from titanplans.precision.float8.report import float8_report
from titanplans.split.converted import float8_linears


def convert(model, recipe="tensorwise", **options):
    return convert_to_float8(model, Float8(recipe_name=recipe, **options))


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x):
        return self.down_proj(F.silu(self.up_proj(x)))


class Reads(Block):
    """Uses a child's weight directly, as a fused kernel does."""

    def forward(self, x):
        return F.linear(self.up_proj(x), self.down_proj.weight, self.down_proj.bias)


def two_blocks(width=32):
    return nn.Sequential(Block(), Block(width))


def test_names_and_parameters_are_unchanged_and_each_module_is_reported():
    model = two_blocks().eval()
    before = dict(model.named_parameters())
    done = convert(model, "rowwise", filter_fqns=["1.up"], emulate=True)
    assert dict(model.named_parameters()) == before
    assert all(after is before[name] for name, after in model.named_parameters())
    assert done.converted == ("0.up_proj", "0.down_proj", "1.down_proj")
    assert done.filtered == {"1.up_proj": "filter_fqns has '1.up'"}
    assert list(float8_linears(model)) == list(done.converted)
    assert not any(module.training for module in model.modules())
    assert float8_report(model, done, {}) == {
        "recipe": "rowwise",
        "emulated": True,
        "converted": ("0.up_proj", "0.down_proj", "1.down_proj"),
        "filtered": {"1.up_proj": "filter_fqns has '1.up'"},
        "unfused": (),
        "fsdp_all_gather": False,
        "scales_together": False,
        "borders": {},
    }
    assert float8_report(two_blocks(), None, {}) is None


def test_unaligned_modules_are_refused_or_skipped_by_option():
    with pytest.raises(ParallelError, match=r"1.up_proj \(Linear, 24 out\).*multiples of 16"):
        convert(two_blocks(24))
    done = convert(two_blocks(24), filter_unaligned=True)
    assert done.converted == ("0.up_proj", "0.down_proj")
    assert done.filtered == {
        "1.up_proj": "24 out: not a multiple of 16",
        "1.down_proj": "24 in: not a multiple of 16",
    }


def test_small_modules_are_skipped_by_the_table_of_torchao():
    sizes = ((4096, 4096), (64, 64), (4096, 4097))
    model = nn.Sequential(*(nn.Linear(*size, device="meta") for size in sizes))
    done = convert(model, "rowwise", filter_fqns=[SMALL], emulate=True)
    assert done.converted == ("0",)
    assert done.filtered == {
        "1": "auto_filter_small_kn: too small to gain",
        "2": "auto_filter_small_kn: 4097 out",
    }


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def hooked():
    model = two_blocks()
    model[0].up_proj.register_forward_hook(lambda *_: None)
    return model


def converted():
    model = two_blocks()
    convert(model)
    return model


def held_twice():
    model = two_blocks()
    model[1].up_proj = model[0].up_proj
    return model


def named_twice():
    model = two_blocks()
    model[0].again = model[0].up_proj
    return model


REFUSED = {
    "named twice": (named_twice, {}, "0.up_proj is one module under two names"),
    "held twice": (held_twice, {}, "0.up_proj is one module under two names"),
    "no such part": (two_blocks, {"filter_fqns": ["output"]}, r"'output' is part of no .* up_proj, down"),
    "an empty part": (two_blocks, {"filter_fqns": [""]}, "'' is part of no Linear's name"),
    "nothing left": (two_blocks, {"filter_fqns": ["proj"]}, "no Linear of Sequential remains after the filters"),
    "no Linear": (lambda: nn.Sequential(nn.ReLU()), {}, "no Linear of Sequential remains"),
    "no figures": (two_blocks, {"recipe": "rowwise_with_gw_hp", "filter_fqns": [SMALL]}, "torchao has no measurements for"),
    "own forward": (lambda: nn.Sequential(OwnForward(16, 16)), {}, "0 is a OwnForward, whose forward"),
    "hooks": (hooked, {}, "0.up_proj has hooks"),
    "twice": (converted, {}, "0.up_proj is converted to float8 already"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_errors_come_before_any_module_changes(case):
    make, options, message = REFUSED[case]
    model = make()
    types = [type(module) for module in model.modules()]
    with pytest.raises(ParallelError, match=message):
        convert(model, **options)
    assert [type(module) for module in model.modules()] == types


def test_a_tied_weight_is_not_gathered_in_float8():
    kernels.install("cpu")
    model = modeling.build(modeling.load_config("qwen3", "debug", tie_word_embeddings=True))
    with pytest.raises(ParallelError, match=r"one tensor, .*float8 all-gather.* 'lm_head'"):
        convert(model, enable_fsdp_float8_all_gather=True)
    convert(model, enable_fsdp_float8_all_gather=True, filter_fqns=["lm_head"])


def test_without_torchao_nothing_is_float8(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "torchao" else real(name, *a)
    )
    with pytest.raises(MissingLibrary, match=r"needs torchao, which is not installed"):
        convert(two_blocks())


def test_a_weight_that_the_parent_uses_itself_is_detected_in_the_first_forward():
    model = nn.Sequential(Block(), Reads())
    convert(model, emulate=True)
    check_calls(model)
    with pytest.raises(ParallelError, match=r"1.down_proj .*float8, .*parent 1 \(Reads\)"):
        model(torch.randn(16, 32))


def test_under_compile_it_is_detected_in_the_source_of_the_parent():
    model = nn.Sequential(Block(), Reads())
    convert(model, emulate=True)
    with pytest.raises(ParallelError, match=r"1.down_proj .*float8, .*parent 1 \(Reads\)"):
        refuse_read_weights(model)
    fine = nn.Sequential(Block())
    convert(fine, emulate=True)
    refuse_read_weights(fine)


def test_a_module_that_does_not_run_is_no_error():
    class Tower(nn.Module):
        def __init__(self):
            super().__init__()
            self.text, self.vision = Block(), Block()

        def forward(self, x):
            return self.text(x)

    model = Tower()
    convert(model, emulate=True)
    check_calls(model)
    model(torch.randn(16, 32))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# Options of a strategy.

OPTIONS = {
    "no recipe": (
        {"emulate": True},
        "float8.emulate = true: .*float8.recipe_name",
    ),
    "rows": (
        {"recipe_name": "rowwise", "enable_fsdp_float8_all_gather": True},
        'enable_fsdp_float8_all_gather = true: .*recipe_name = "rowwise"',
    ),
    "no gather": (
        {"recipe_name": "tensorwise", "precompute_float8_dynamic_scale_for_fsdp": True},
        "no effect unless .*enable_fsdp_float8_all_gather",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_exclude_each_other_are_refused(case):
    options, message = OPTIONS[case]
    with pytest.raises(ParallelError, match=message):
        FSDP2Config(float8=options)
