"""Conversion to float8, strictly, and FSDP2 that gathers in it; over four gloo ranks, against one process."""

import importlib.util
import tempfile

import pytest
import torch
import worlds
import zoo
from said import error_of
from torch import nn
from torch.nn import functional as F

from titanplans import kernels, modeling
from titanplans.parallel import (
    Degrees,
    Float8,
    FSDP2Config,
    ParallelError,
    ParallelManager,
    convert_to_float8,
)
from titanplans.plan.converted import RECIPES, float8_linears
from titanplans.precision.float8.conversion import SMALL, check_calls, refuse_read_weights
from titanplans.precision.float8.report import float8_report


def convert(model, recipe="tensorwise", **options):
    return convert_to_float8(model, Float8(recipe_name=recipe, **options))


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(32, width), nn.Linear(width, 32)

    def forward(self, x):
        return self.down_proj(F.silu(self.up_proj(x)))


class Reads(Block):
    """Reads the weight of a child itself, as a fused kernel does."""

    def forward(self, x):
        return F.linear(self.up_proj(x), self.down_proj.weight, self.down_proj.bias)


def two_blocks(width=32):
    return nn.Sequential(Block(), Block(width))


def test_names_and_parameters_stay_and_each_module_is_told():
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


def test_what_is_not_aligned_is_refused_or_left_out_if_asked():
    with pytest.raises(ParallelError, match=r"1.up_proj \(Linear, 24 out\).*multiples of 16"):
        convert(two_blocks(24))
    done = convert(two_blocks(24), filter_unaligned=True)
    assert done.converted == ("0.up_proj", "0.down_proj")
    assert done.filtered == {
        "1.up_proj": "24 out: no multiple of 16",
        "1.down_proj": "24 in: no multiple of 16",
    }


def test_small_modules_are_left_out_by_torchaos_figures():
    model = nn.Sequential(nn.Linear(4096, 4096, device="meta"), nn.Linear(64, 64, device="meta"))
    done = convert(model, "rowwise", filter_fqns=[SMALL], emulate=True)
    assert done.converted == ("0",)
    assert done.filtered == {"1": "auto_filter_small_kn: too small to gain"}


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


REFUSED = {
    "no such part": (two_blocks, {"filter_fqns": ["output"]}, r"'output' is part of no .* up_proj, down"),
    "an empty part": (two_blocks, {"filter_fqns": [""]}, "'' is part of no Linear's name"),
    "nothing left": (two_blocks, {"filter_fqns": ["proj"]}, "no Linear of Sequential is left by the filters"),
    "no Linear": (lambda: nn.Sequential(nn.ReLU()), {}, "no Linear of Sequential is left"),
    "no figures": (
        two_blocks,
        {"recipe": "rowwise_with_gw_hp", "filter_fqns": [SMALL]},
        "torchao has no figures for",
    ),
    "own forward": (lambda: nn.Sequential(OwnForward(16, 16)), {}, "0 is a OwnForward, whose own forward"),
    "hooks": (hooked, {}, "0.up_proj has hooks"),
    "twice": (converted, {}, "0.up_proj is converted to float8 already"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_anything_is_changed(case):
    make, options, words = REFUSED[case]
    model = make()
    types = [type(module) for module in model.modules()]
    with pytest.raises(ParallelError, match=words):
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
    with pytest.raises(ParallelError, match=r"needs torchao, .*not installed"):
        convert(two_blocks())


def test_a_weight_that_the_parent_reads_itself_is_found_in_the_first_forward():
    model = nn.Sequential(Block(), Reads())
    convert(model, emulate=True)
    check_calls(model)
    with pytest.raises(ParallelError, match=r"1.down_proj .*float8, .*parent 1 \(Reads\)"):
        model(torch.randn(16, 32))


def test_compiled_it_is_found_in_the_source_of_the_parent():
    model = nn.Sequential(Block(), Reads())
    convert(model, emulate=True)
    with pytest.raises(ParallelError, match=r"1.down_proj .*float8, .*parent 1 \(Reads\)"):
        refuse_read_weights(model)
    fine = nn.Sequential(Block())
    convert(fine, emulate=True)
    refuse_read_weights(fine)


def test_a_part_that_does_not_run_is_not_missed():
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
def test_options_that_exclude_each_other(case):
    options, words = OPTIONS[case]
    with pytest.raises(ParallelError, match=words):
        FSDP2Config(float8=options)


# FSDP2 and tensor parallelism.

STEPS = 2


def train(model, manager=None, steps=STEPS):
    """Return the losses of `steps` on the same tokens, of which a data-parallel rank has its share."""
    tokens = torch.randint(0, 128, (4, 17), generator=torch.Generator().manual_seed(0))
    rank, size = 0, 1
    if manager is not None:
        rank, size = manager.mesh.get_mesh("dp").get_local_rank(), manager.mesh.get_mesh("dp").size()
    mine = tokens.chunk(size)[rank]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        logits = model(input_ids=mine[:, :-1], use_cache=False).logits
        if manager is None:
            loss = F.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten())
        else:
            loss = manager.cross_entropy(logits, mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        if manager is not None:
            torch.distributed.all_reduce(total, group=manager.mesh.get_mesh("dp").get_group())
        losses.append(total.item())
    return losses


ALIGNED = dict(intermediate_size=64, vocab_size=128)
"""Multiples of 16 on each of four ranks."""
WAYS = {
    "dp": (Degrees(), {}),
    "dp, gathered in float8": (Degrees(), {"enable_fsdp_float8_all_gather": True}),
    "dp, gathered in float8, scales together": (
        Degrees(),
        {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True},
    ),
    "tp": (Degrees(tp=4), {}),
    "tp x dp": (Degrees(tp=2), {}),
    "tp x dp, gathered in float8": (
        Degrees(tp=2),
        {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True},
    ),
    "tp x copies": (Degrees(tp=2, dp_replicate=2, dp_shard=1), {}),
    "tp x dp, rows": (Degrees(tp=2), {"recipe_name": "rowwise"}),
    **{
        f"tp x dp, recomputed: {mode}": (Degrees(tp=2), {"mode": mode})
        for mode in ("full", "selective", "mlp", "keep_mixer")
    },
}
REFUSED_WAYS = {
    "scale of a share": (
        Degrees(tp=2),
        {"enable_fsdp_float8_all_gather": True},
        "set precompute_float8_dynamic_scale_for_fsdp = true",
    ),
    "smaller groups": (
        Degrees(),
        {"enable_fsdp_float8_all_gather": True, "reshard": 2},
        "can't gather float8 from",
    ),
    "nothing gathered": (
        Degrees(tp=4),
        {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True},
        "data_parallel_shard_degree = 1 gathers nothing",
    ),
}


def strategy(options):
    options = dict(options)
    compiled = (
        {"enable": True, "components": ["model"], "backend": "aot_eager"}
        if options.pop("compile", False)
        else {}
    )
    recomputed = {"mode": options.pop("mode", "none"), "selective_ac_option": "op"}
    reshard, kept = options.pop("reshard", "default"), options.pop("keep_gathered", False)
    return FSDP2Config(
        float8={"recipe_name": "tensorwise", "emulate": True} | options,
        compile=compiled,
        activation_checkpoint=recomputed,
        fsdp_reshard_after_forward=reshard,
        fsdp_keep_gathered=kept,
    )


def on_four_ranks(rank):
    kernels.install("cpu")
    config = zoo.config("qwen3", options=False, **ALIGNED)
    found = {}
    for name, (degrees, options) in WAYS.items():
        found[name] = train(*_built(config, (degrees, options)))
    found["evaluated"] = {
        name: _evaluated(config, WAYS[name]) for name in WAYS if name.startswith(("dp", "tp x dp, gathered"))
    }
    found["saved"] = _saved(config)
    together = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
    found["kept"] = [_accumulated(config, {"keep_gathered": True} | more) for more in ({}, together)]
    for name, (degrees, options, _) in REFUSED_WAYS.items():
        manager = ParallelManager(strategy(options), degrees)
        found[name] = error_of(manager.parallelize, modeling.build(config))
    return found


def on_two_ranks(rank):
    """The losses eager and compiled: of Qwen3, whose blocks are one graph each, and of GLA."""
    kernels.install("cpu")
    config = zoo.config("qwen3", options=False, **ALIGNED)
    ways = [(Degrees(tp=2), {"compile": compiled}) for compiled in (False, True)]
    return [train(*_built(config, way)) for way in ways], [_gla(compiled) for compiled in (False, True)]


def _built(config, way):
    degrees, options = way
    manager = ParallelManager(strategy(options), degrees)
    model = manager.parallelize(modeling.build(config))
    manager.to_empty()
    modeling.initialize(model, seed=0)
    return model, manager


def _evaluated(config, way):
    """Losses after training, without gradients: batch by batch, and gathered once for both."""
    model, manager = _built(config, way)
    train(model, manager, 1)
    tokens = torch.randint(0, 128, (2, 2, 17), generator=torch.Generator().manual_seed(1))

    def losses():
        return [
            manager.cross_entropy(model(t[:, :-1], use_cache=False).logits, t[:, 1:]).item() for t in tokens
        ]

    with torch.no_grad():
        each = losses()
    train(model, manager, 1)  # again: the scales of before would be others
    with torch.no_grad():
        later = losses()
    train(model, manager, 1)
    with manager.evaluation():
        once = losses()
    with torch.no_grad():
        return each, later, once, losses()


def _accumulated(config, options):
    """Losses of two steps of two micro batches, between which weights stay gathered."""
    model, manager = _built(config, (Degrees(), options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = torch.randint(0, 128, (2, 2, 17), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        for number, batch in enumerate(batches):
            with manager.accumulate(last=number == 1):
                loss = manager.cross_entropy(model(batch[:, :-1], use_cache=False).logits, batch[:, 1:])
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _saved(config):
    """What a state dict holds whose weights are gathered in float8, and the loss after it was saved and loaded."""
    import torch.distributed.checkpoint as dcp

    from titanplans.plan.converted import float8_linears as converted

    model, manager = _built(config, WAYS["tp x dp, gathered in float8"])
    train(model, manager)
    state = model.state_dict()
    kinds = {type(tensor._local_tensor).__name__ for tensor in state.values()}
    folder = [tempfile.mkdtemp() if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(folder)
    dcp.save(state, checkpoint_id=folder[0])
    again, other = _built(config, WAYS["tp x dp, gathered in float8"])
    loaded = again.state_dict()
    dcp.load(loaded, checkpoint_id=folder[0])
    plain, third = _built(config, WAYS["tp x dp"])
    into = plain.state_dict()
    dcp.load(into, checkpoint_id=folder[0])
    assert converted(plain)
    return kinds, train(model, manager), train(again, other), train(plain, third)


def _gla(compiled):
    """Losses of GLA, whose blocks become several graphs, and how the first mixer is entered."""
    config = zoo.config("gla", options=False, hidden_size=256, num_hidden_layers=1, **ALIGNED)
    model, manager = _built(config, (Degrees(tp=2), {"compile": compiled}))
    borders = manager.parallelism_report().values["float8"]["borders"]
    return train(model, manager), borders["model.layers.0.attn"]["activations"]


def one_process(recipe):
    config = zoo.config("qwen3", options=False, **ALIGNED)
    model = modeling.build(config)
    convert(model, recipe, emulate=True)
    model.to_empty(device="cpu")
    modeling.initialize(model, seed=0)
    return train(model)


results = worlds.results(on_four_ranks, 4)


@pytest.fixture(scope="module")
def expected():
    kernels.install("cpu")
    return {recipe: one_process(recipe) for recipe in RECIPES}


@pytest.mark.parametrize("way", WAYS)
def test_trains_as_one_process_does(way, results, expected):
    """The first loss to rounding. After it data-parallel ranks scale activations of their own, by tensorwise;
    and a float32 that is rounded otherwise may become the next float8 number, a sixteenth off: of some of 10^5."""
    whole = expected[WAYS[way][1].get("recipe_name", "tensorwise")]
    assert results[way][0] == pytest.approx(whole[0], rel=2e-3)
    assert results[way] == pytest.approx(whole, rel=1e-2)
    assert whole[0] - whole[-1] > 0.05  # and it does learn


def test_a_gather_in_float8_changes_nothing(results):
    """The weight is cast before or after it is gathered: the same numbers, if the scale is the same."""
    assert results["dp, gathered in float8"] == results["dp"]
    assert results["dp, gathered in float8, scales together"] == results["dp"]
    assert results["tp x dp, gathered in float8"] == results["tp x dp"]


@pytest.mark.parametrize("way", [way for way in WAYS if "recomputed" in way])
def test_recomputed_it_is_the_same(way, results):
    assert results[way] == results["tp x dp"]


def test_compiled_it_is_the_same():
    """GLA's blocks are several graphs, which hand no float8 tensor to each other."""
    losses, ((eager, crossed), (compiled, plain)) = worlds.run(on_two_ranks, 2)
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert crossed == "in float8"
    assert plain == "not in float8: its compiled graphs can't hand a float8 tensor to each other"
    assert compiled == pytest.approx(eager, rel=1e-2)


def test_evaluation_is_the_same_however_weights_are_gathered(results):
    """After each step the scales are those of the new weights, also where they are gathered outside of a forward."""
    found = results["evaluated"]
    for name in ("dp, gathered in float8", "dp, gathered in float8, scales together"):
        assert found[name] == found["dp"]
    for each, later, once, again in found.values():
        assert once == again
        assert each != later != once


def test_weights_that_stay_gathered_keep_their_scales(results):
    plain, together = results["kept"]
    assert together == plain


def test_a_checkpoint_holds_weights_as_they_are_stored(results):
    """Anybody can read it; who loads it with or without the gather in float8 goes on alike, but for AdamW's moments."""
    kinds, went_on, again, plain = results["saved"]
    assert kinds == {"Tensor"}
    assert again == plain
    assert again[0] == went_on[0]


@pytest.mark.parametrize("way", REFUSED_WAYS)
def test_refused_ways(way, results):
    assert REFUSED_WAYS[way][2] in results[way]
