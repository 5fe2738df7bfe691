"""Each kernel of FLA, as the layers of all its families call it, against what stands in for it on a CPU."""

import json
import os
from collections.abc import Iterable

import pytest
import torch

from tests.support.interpreted.calls import Call, Difference, compare, recorded, siblings, widened
from tests.support.interpreted.deviations import DEVIATIONS
from tests.support.interpreted.models import (
    LENGTHS,
    NO_CACHE,
    ONE_AT_A_TIME,
    build,
    families,
    inputs,
    packed,
    variants,
)

_seen: set[str] = set()


def _wrong(found: Iterable[Difference]) -> list[Difference]:
    return [one for one in found if one.is_wrong()]


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
            known = DEVIATIONS.get(call.place)
            if not _wrong(wide):
                why = known.why if known else "rounds to 16 bits inside; widened it agrees"
            elif known and _has_states(differences):
                why = known.why
                rest = _wrong(compare(call, states=False))
                wrong += [_line(call, one) for one in rest if not one.of.startswith(known.states)]
            else:
                wrong += [_line(call, one) for one in _wrong(wide)]
        _keep(call, name, condition, differences, why)
    assert not wrong, "\n".join(wrong)


def _line(call: Call, found: Difference) -> str:
    return f"{call.place}: {found}; {call.key}"


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
    found = _trained(name, lambda config: inputs(config, length, sequences=sequences))
    _check(name, f"{length} tokens", found + [other for call in found for other in siblings(call)])


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
