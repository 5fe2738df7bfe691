"""Each kind of style sends no more than it needs, and styles that send more are found."""

import pytest
import torch

from tests import zoo
from tests.support.faulty_styles import installed
from titanplans import Degrees, TPOptions, apply_plan, modeling, registered_plans
from titanplans.loss import cross_entropy
from titanplans.modeling.samples import build_real, sample_inputs
from titanplans.observe.communication import Communication, count_communication
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.split.collectives import gather, sum_in_region
from titanplans.split.module_weight import local_parameter

KINDS = {
    "phi3": 0,  # packed projections
    "glm4": 0,  # packed projections of the MLP
    "gated_deltaproduct": 0,  # packed over the n steps of a token
    "falcon": 0,  # one key/value head
    "olmo2": 0,  # norms over all heads
    "mamba2": 1,  # a norm over groups that ranks share
    "gsa": 0,  # a norm fused with the matrix product after it
    "mamba": 0,  # a sum inside the region
    "rodimus": 0,  # sums of products in the mixer's own code, and three regions per block
    "stablelm": 1,  # gathered norms
    "bitnet": 0,  # a replicated mixer
    "gpt2": 0,  # the stream ends before the head
    "cat": 0,  # a stream longer than the tokens, and tokens that a compressor embeds
    "yoco": 0,  # several blocks share keys and values
    "gated_deltanet": 1,
}
"""The index in zoo.FAMILIES of each family's variant."""

CHOICES = (
    TPOptions(Degrees(tp=2)),
    TPOptions(Degrees(tp=4), sequence_parallel=False),
    TPOptions(Degrees(tp=4), loss_parallel=False),
)


pytestmark = pytest.mark.usefixtures("cpu_kernels")


def count(name: str, options: TPOptions, variant: int = 0, plan=None, length: int = 16) -> Communication:
    with fake_ranks(options.degrees.tp) as mesh:
        fields = zoo.FURTHER[name] if name in zoo.FURTHER else zoo.FAMILIES[name][variant]
        config = modeling.load_config(name, "debug", **fields)
        model = build_real(config, dtype=torch.float32)
        inputs = sample_inputs(config, batch_size=2, seq_len=length, seed=0)
        applied = apply_plan(
            model,
            mesh,
            plan=plan,
            loss_parallel=options.loss_parallel,
            sequence_parallel=options.sequence_parallel,
        )

        def run() -> None:
            logits = model(**inputs, use_cache=False).logits
            cross_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long), 1).backward()

        return count_communication(model, applied, run, options)


@pytest.mark.parametrize("name", KINDS)
def test_styles_send_exactly_what_they_declare(name):
    for options in CHOICES:
        if name == "cat" and options.shards > 2:
            continue  # its stream is longer than the tokens, and 4 ranks do not divide the stream's length
        communication = count(name, options, KINDS[name])
        assert communication.minimal, communication.lines()
        for part in communication.parts:
            for direction in ("forward", "backward"):
                issued, needed = communication.of(part, direction), communication.needed(part, direction)
                # titanplans' loss sends one collective in a direction for which the bound allows several.
                expected = min(len(needed), 1) if part == "loss" else len(needed)
                assert len(issued) == expected, (options, part, direction, communication.lines())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(zoo.FAMILIES.keys() - KINDS.keys()))
def test_styles_of_all_other_families_send_exactly_what_they_declare(name):
    for variant in range(len(zoo.FAMILIES[name])):
        assert count(name, CHOICES[0], variant).minimal


@pytest.mark.parametrize(
    "name", [n if n == "gemma4_text" else pytest.param(n, marks=pytest.mark.exhaustive) for n in zoo.FURTHER]
)
def test_styles_of_further_architectures_send_exactly_what_they_declare(name):
    """Hunyuan 4's stream begins with four copies of the embedding's output, so four gradients are gathered."""
    assert count(name, CHOICES[0], 0).minimal == (name != "hy_v4")


def summed_twice(original, module, border):
    original(module, border)
    group = border.group
    module.register_forward_hook(lambda module, args, output: sum_in_region(output, group) / group[1])


def exchanged_twice(original, module, border):
    original(module, border)
    module.register_forward_hook(
        lambda module, args, output: output + 0 * local_parameter(module, "weight").sum()
    )


def gathering(original, module, border):
    """Wastefully gather a tensor of twice the width."""
    original(module, border)
    group = border.group

    def gathered(module, args):
        (x,) = args
        twice = torch.cat([x, x], -1)  # more elements than the region's border sends
        return (x + 0 * gather(twice, x.ndim - 1, twice.shape[-1] * group[1], group).sum(),)

    module.register_forward_pre_hook(gathered)


def with_installation(name, key, install):
    """Return the plan of an architecture, in which `install` installs the style at `key` of the mixers."""

    class Wasteful(registered_plans()[name]):
        def attn_plan(self, attn):
            plan = super().attn_plan(attn)
            return plan | {key: installed(plan[key], install)}

    return Wasteful


@pytest.mark.parametrize(
    ("name", "key", "install", "sent"),
    [
        ("mamba", "x_proj", summed_twice, ("all_reduce", "all_reduce")),
        ("phi3", "qkv_proj", exchanged_twice, ("all_to_all", "all_to_all")),
        ("olmo2", "q_norm", gathering, ("all_gather", "reduce_scatter")),
    ],
)
def test_a_style_that_sends_more_is_named(name, key, install, sent):
    communication = count(name, TPOptions(Degrees(tp=2)), plan=with_installation(name, key, install))
    assert not communication.minimal
    for block in communication.decoder.blocks:
        for direction, operation in zip(("forward", "backward"), sent, strict=True):
            over = [(c.operation, c.module) for c in communication.exceeding(block.name, direction)]
            assert over == [(operation, f"{block.mixers[0]}.{key}")]
