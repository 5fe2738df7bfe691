"""Each kernel of FLA, called as the layers of all FLA's families call it, agrees with its stand-in on a CPU."""

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


def _wrong(differences: Iterable[Difference]) -> list[Difference]:
    return [difference for difference in differences if difference.is_wrong()]


def _has_states(differences: list[Difference]) -> bool:
    return any(
        difference.tensor == "output 2" or "initial_state" in difference.tensor for difference in differences
    )


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
            deviation = DEVIATIONS.get(call.place)
            if not _wrong(wide):
                why = (
                    deviation.why
                    if deviation
                    else "rounds to 16 bits internally; without this rounding the results agree"
                )
            elif deviation and _has_states(differences):
                why = deviation.why
                without_states = _wrong(compare(call, states=False))
                wrong += [_line(call, d) for d in without_states if not d.tensor.startswith(deviation.states)]
            else:
                wrong += [_line(call, difference) for difference in _wrong(wide)]
        _write(call, name, condition, differences, why)
    assert not wrong, "\n".join(wrong)


def _line(call: Call, difference: Difference) -> str:
    return f"{call.place}: {difference}; {call.key}"


def _write(call: Call, name: str, condition: str, differences: list[Difference], why: str) -> None:
    """Append a line to the file that the environment variable KERNELS_COMPARED names, for tests/support/pages/kernels.py."""
    if file := os.environ.get("KERNELS_COMPARED"):
        worst = max(differences, key=lambda difference: difference.between)
        backward = any(difference.tensor.startswith("gradient") for difference in differences)
        line = dict(
            place=call.place, model=name, condition=condition, worst=worst.between, backward=backward, why=why
        )
        with open(file, "a") as out:
            out.write(json.dumps(line) + "\n")


def _calls_of_training(name, make_inputs):
    calls = []
    for fields in variants(name):
        model = build(name, fields)
        batch = make_inputs(model.config)
        if batch is None:
            pytest.skip(f"{name} does not keep documents apart")
        with recorded() as of_variant:
            model(**batch).loss.backward()
        calls += of_variant
    return calls


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", families())
def test_kernels_of_a_step_agree(name, length):
    sequences = 2 if length < 64 else 1
    calls = _calls_of_training(name, lambda config: inputs(config, length, sequences=sequences))
    _check(name, f"{length} tokens", calls + [sibling for call in calls for sibling in siblings(call)])


@pytest.mark.parametrize("name", families())
def test_kernels_with_documents_agree(name):
    _check(name, "documents", _calls_of_training(name, packed))


@pytest.mark.parametrize("name", [name for name in families() if name not in NO_CACHE])
def test_kernels_with_states_agree(name):
    """The cache that one forward returns is an input of the next forward."""
    for fields in variants(name):
        model = build(name, fields).eval()
        tokens = inputs(model.config, 72)["input_ids"]
        with recorded() as calls, torch.set_grad_enabled(name not in ONE_AT_A_TIME):
            cache = None
            for new in tokens.split([66, 1, 5] if name in ONE_AT_A_TIME else [66, 5, 1], 1):
                if name in ONE_AT_A_TIME and new.shape[1] == 5:
                    continue
                mask = torch.ones(1, 66 if cache is None else 66 + new.shape[1])
                arguments = dict(input_ids=new, past_key_values=cache, use_cache=True)
                arguments |= dict(attention_mask=mask) if name == "forgetting_transformer" else {}
                cache = model(**arguments).past_key_values
        _check(name, "states", calls)


@pytest.mark.parametrize("name", ["gla", "gated_deltanet", "kda", "transformer", "hgrn2", "delta_net"])
def test_kernels_in_bfloat16_agree(name):
    # Kernel and stand-in each round outputs and gradients to bfloat16, which changes them by up to a relative 2^-9.
    model = build(name, variants(name)[0]).bfloat16()
    with recorded() as calls:
        model(**inputs(model.config, 70)).loss.backward()
    wrong = [(call.place, str(d)) for call in calls for d in compare(call) if d.between > 4 * 2**-8]
    assert not wrong, wrong
