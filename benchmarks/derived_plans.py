"""Derive a plan for each model type of transformers with a causal head: what is proved, and in how many seconds.

python benchmarks/derived_plans.py              # all types, one after the other
python benchmarks/derived_plans.py llama opt    # these types

Plans are proved at tp 2 in one plain step, as `titanplans derive TYPE --tp 2 --conditions plain` does. The plan that is
registered for a type is not read.
"""

import multiprocessing
import re
import sys
import textwrap
import time
from functools import partial

import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MOST_SECONDS = 300
"""Wall-clock seconds after which a type is given up."""
HEAD = """| type | registered | derived | lines | not split | proofs | seconds |
|---|---|---|---|---|---|---|"""
REMEDIES = re.compile(
    r"; (name a function that returns|name a config|write one by hand|give it this|set its dropout).*|: give both keys.*"
    r"|: add '.*| \(\S*/[^)]*\)|no plan is derived for \w+: |derive \w+: "
)
WRONG = re.compile(r"((?:first wrong at|does not run, in) .*)")


def main(names: list[str]) -> None:
    print(HEAD)
    context = multiprocessing.get_context("spawn")
    pool = context.Pool(1)
    for name in names or sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING)):
        try:
            cells = pool.apply_async(row, (name,)).get(timeout=MOST_SECONDS)
        except multiprocessing.TimeoutError:
            pool.terminate()
            pool = context.Pool(1)
            cells = (f"`{name}`", "", f"not in {MOST_SECONDS} s", "", "", "", "")
        print(f"| {' | '.join(cells)} |", flush=True)


def row(name: str) -> tuple[str, ...]:
    """Return the cells of one type."""
    from transformers import logging

    from titanplans import kernels, modeling, registered_plans
    from titanplans.derive import default_config, derive, small_configs
    from titanplans.errors import UserError

    logging.set_verbosity_error()
    kernels.install("cpu")
    plan = registered_plans().get(name)
    first = (f"`{name}`", "" if plan is None else f"`{plan.__name__}`")
    start = time.process_time()  # CPU time, so that other programs on the machine do not count
    try:
        is_available = name in modeling.available()
        config = modeling.load_config(name, "debug") if is_available else default_config(name)
        make, make_other = (
            None if small is None else partial(modeling.build_real, small, dtype=torch.float64)
            for small in small_configs(config)
        )
        derived = derive(make, other_fn=make_other, degrees=[2], conditions="plain", exclude=[name])
    except UserError as error:
        return (*first, f"refused: {short(str(error))}", "", "", "", f"{time.process_time() - start:.0f}")
    lines = derived.text.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("class "))
    size = sum(bool(line.strip()) for line in lines[begin:])
    unsplit = dict.fromkeys(note.split(" ")[0] for note in derived.notes if "is not split" in note)
    verdict = "proved" if derived.is_proved else short(derived.notes[-1])
    return (
        *first,
        verdict,
        str(size),
        ", ".join(f"`{part}`" for part in unsplit),
        str(derived.proofs),
        f"{time.process_time() - start:.0f}",
    )


def short(reason: str) -> str:
    """Return a reason in one line, without its remedy; for a failed proof, only the first wrong module."""
    if wrong := WRONG.search(reason):
        reason = f"not proved: {wrong[1]}"
    return textwrap.shorten(REMEDIES.sub("", reason).replace("|", "/"), 240, placeholder=" …")


if __name__ == "__main__":
    main(sys.argv[1:])
