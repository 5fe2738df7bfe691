"""Each kernel of FLA, as the layers of all its families call it, against what stands in for it on a CPU."""

import json
import os
from collections.abc import Iterable

import pytest
import torch
from calls import Call, Difference, compare, recorded, widened

from models import LENGTHS, NO_CACHE, ONE_AT_A_TIME, build, families, inputs, packed, variants

ENOUGH = 1e-5
"""Relative, in float32: a kernel and its stand-in sum in other orders."""
ROUNDING = 8
"""Else a kernel, which sums block by block, may be so many times as far from float64 as the stand-in in float32."""

NAMED = {
    "fla.modules.causal_conv1d.ops:CausalConv1dFunction": (
        (),
        "no gradient passes through the oldest input of the cache, which no later token looks at",
    ),
    "fla.ops.hgrn.chunk:chunk_hgrn": (
        ("gradient of initial_state",),
        "no gradient passes through states, the final and the initial one",
    ),
    "fla.ops.rwkv6.fused_recurrent:fused_recurrent_rwkv6": ((), "no gradient passes through the final state"),
    "fla.ops.abc.chunk:chunk_abc": (
        ("output 2", "output 3", "gradient of initial_state", "gradient of s"),
        "the final states are wrong where the tokens are no multiple of 64, and no gradient passes into the initial ones",
    ),
}
"""What FLA's kernels do otherwise with states: what is wrong even if no final state is used, and why. The rest agrees."""
IN_16_BITS = {
    "fla.ops.mesa_net.chunk:chunk_mesa_net": 1e-2,
    "fla.ops.mesa_net.decoding_one_step:mesa_net_decoding_one_step": 1e-2,
}
"""Kernels that get float16 from FLA's code around them, 2^-11, which the solution of a system makes larger."""

_seen: set[str] = set()


def _wrong(differences: Iterable[Difference]) -> list[Difference]:
    return [
        found
        for found in differences
        if found.between > ENOUGH and found.kernel > ROUNDING * found.stand_in + ENOUGH
    ]


def _has_states(differences: list[Difference]) -> bool:
    return any(found.of == "output 2" or "initial_state" in found.of for found in differences)


def _check(name: str, condition: str, calls: list[Call]) -> None:
    wrong = []
    for call in calls:
        if call.key in _seen:
            continue
        _seen.add(call.key)
        differences, why = compare(call), ""
        if _wrong(differences):
            with widened():
                wide = compare(call)
            if not _wrong(wide):
                why = "rounds to 16 bits inside; widened it agrees"
            elif call.place in NAMED and _has_states(differences):
                besides, why = NAMED[call.place]
                rest = compare(call, states=False)
                wrong += [
                    f"{call.place}: {found}; {call.key}"
                    for found in _wrong(rest)
                    if not found.of.startswith(besides)
                ]
            elif all(found.between <= IN_16_BITS.get(call.place, 0) for found in differences):
                why = "gets float16"
            else:
                wrong += [f"{call.place}: {found}; {call.key}" for found in _wrong(wide)]
        _keep(call, name, condition, differences, why)
    assert not wrong, "\n".join(wrong)


def _keep(call: Call, name: str, condition: str, differences: list[Difference], why: str) -> None:
    """Write a line for the page (page.py), where one is asked for."""
    if file := os.environ.get("KERNELS_COMPARED"):
        worst = max(differences, key=lambda found: found.between)
        backward = any(found.of.startswith("gradient") for found in differences)
        line = dict(
            place=call.place, model=name, condition=condition, worst=worst.between, backward=backward, why=why
        )
        with open(file, "a") as out:
            out.write(json.dumps(line) + "\n")


def _trained(name, given_of):
    calls = []
    for fields in variants(name):
        model = build(name, fields)
        given = given_of(model.config)
        if given is None:
            pytest.skip(f"{name} does not keep documents apart")
        with recorded() as found:
            model(**given).loss.backward()
        calls += found
    return calls


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", families())
def test_a_step(name, length):
    sequences = 2 if length < 64 else 1
    _check(
        name, f"{length} tokens", _trained(name, lambda config: inputs(config, length, sequences=sequences))
    )


@pytest.mark.parametrize("name", families())
def test_documents(name):
    _check(name, "documents", _trained(name, packed))


@pytest.mark.parametrize("name", [name for name in families() if name not in NO_CACHE])
def test_states(name):
    """A beginning, some more tokens, and one: states go out and in."""
    for fields in variants(name):
        model = build(name, fields).eval()
        tokens = inputs(model.config, 72)["input_ids"]
        with recorded() as found, torch.set_grad_enabled(name not in ONE_AT_A_TIME):
            cache = None
            for part in tokens.split([66, 1, 5] if name in ONE_AT_A_TIME else [66, 5, 1], 1):
                if name in ONE_AT_A_TIME and part.shape[1] == 5:
                    continue
                seen = torch.ones(1, 66 if cache is None else 66 + part.shape[1])
                given = dict(input_ids=part, past_key_values=cache, use_cache=True)
                given |= dict(attention_mask=seen) if name == "forgetting_transformer" else {}
                cache = model(**given).past_key_values
        _check(name, "states", found)


@pytest.mark.parametrize("name", ["gla", "gated_deltanet", "kda", "transformer", "hgrn2", "delta_net"])
def test_bfloat16(name):
    """Both round outputs and gradients to bfloat16, a relative 2^-9; sums of such roundings are within four of them."""
    model = build(name, variants(name)[0]).bfloat16()
    with recorded() as found:
        model(**inputs(model.config, 70)).loss.backward()
    wrong = [(call.place, str(d)) for call in found for d in compare(call) if d.between > 4 * 2**-8]
    assert not wrong, wrong
