"""Derive a plan for each model type of transformers with a causal head: what is proved, and in how many seconds.

python benchmarks/derived_plans.py              # all types, one after the other
python benchmarks/derived_plans.py llama opt    # these types

Plans are proved at tp 2 in one plain step, as `titanplans derive TYPE --tp 2 --conditions plain` does. The plan that is
registered for a type is not read.
"""

import multiprocessing
import re
import sys
import time
from functools import partial

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_SECONDS = 120
HEAD = """| type | registered | derived | lines | not split | proofs | seconds |
|---|---|---|---|---|---|---|"""


def main(names: list[str]) -> None:
    print(HEAD)
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(1)
    for name in names or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)):
        start = time.monotonic()
        try:
            cells = pool.apply_async(row, (name,)).get(timeout=MOST_SECONDS)
        except multiprocessing.TimeoutError:
            pool.terminate()
            pool = context.Pool(1)
            cells = (f"`{name}`", "", f"not in {MOST_SECONDS} s", "", "", "")
        print(f"| {' | '.join(cells)} | {time.monotonic() - start:.0f} |", flush=True)


def row(name: str) -> tuple[str, ...]:
    """Return the cells of one type, except the seconds."""
    from transformers import logging

    from titanplans import kernels, modeling, registered_plans
    from titanplans.derive import derive, small_configs
    from titanplans.errors import UserError

    logging.set_verbosity_error()
    kernels.install("cpu")
    plan = registered_plans().get(name)
    first = (f"`{name}`", "" if plan is None else f"`{plan.__name__}`")
    try:
        config = (
            modeling.load_config(name, "debug") if name in modeling.available() else CONFIG_MAPPING[name]()
        )
        make, make_other = (
            None if small is None else partial(modeling.build_real, small, dtype=torch.float64)
            for small in small_configs(config)
        )
        derived = derive(make, other_fn=make_other, degrees=[2], conditions="plain", exclude=[name])
    except UserError as error:
        reason = re.sub(r"\(\S*/[^)]*\)", "", str(error)).partition(": ")[2] or str(error)
        return (*first, reason[:160].replace("|", "/"), "", "", "")
    lines = derived.text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("class "))
    size = sum(bool(line.strip()) for line in lines[begin:])
    unsplit = dict.fromkeys(note.split(" ")[0] for note in derived.notes if "is not split" in note)
    verdict = "proved" if derived.is_proved else "not proved"
    return (*first, verdict, str(size), ", ".join(f"`{part}`" for part in unsplit), str(derived.proofs))


if __name__ == "__main__":
    main(sys.argv[1:])
