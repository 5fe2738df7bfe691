"""`titanplans derive`: write a plan for a model from its dataflow, and prove it.

Exit status: 0 if the plan is proved, else 1.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers import logging as transformers_logging

from titanplans import kernels, modeling
from titanplans.cli.verify.arguments import degree_list
from titanplans.cli.verify.prepare import call_user_function
from titanplans.cli.verify.subject import Subject, find_model
from titanplans.config import load_job
from titanplans.derive import Derived, default_config, derive, small_configs
from titanplans.disk import is_taken
from titanplans.errors import ConfigError, VerifyError, did_you_mean
from titanplans.plan.degrees import Degrees
from titanplans.plan.kept import facts_of, keep_plan
from titanplans.plan.structure import missing_in, structure_of
from titanplans.proof.cases import CONDITIONS
from titanplans.proof.report import Report
from titanplans.text import counted
from titanplans.training.job.checks import import_custom
from titanplans.training.job.resolve import hf_config


def main(argv: list[str]) -> int:
    """Derive and print a plan; return 0 if it is proved, else 1.

    Raises:
        UserError: there is no such model, it does not run on a CPU, or nothing in it can be split.
    """
    arguments = _parser().parse_args(argv)
    if arguments.output is not None and is_taken(arguments.output):
        raise ConfigError(f"--output {arguments.output} exists and is not overwritten; name a new file")
    if arguments.name is not None and not arguments.name.isidentifier():
        raise ConfigError(f"--name {arguments.name} is not the name of a class; write one such as MyPlan")
    if arguments.keep and arguments.tp is not None:
        raise ConfigError("--tp: a job may have any degrees, so --keep proves the default ones; leave it out")
    kernels.install("cpu")
    transformers_logging.set_verbosity_error()  # notes on padding and on caches do not concern random models
    began = time.monotonic()
    subject = _subject(arguments.model)
    make, make_other, model_type = _models(subject, arguments.other)
    facts = _facts(subject, make) if arguments.keep else None
    degrees = None if arguments.tp is None else [Degrees(tp=degree, dp_shard=1) for degree in arguments.tp]
    derived = derive(
        make,
        arguments.name or _class_name(model_type or arguments.model.rpartition(":")[2]),
        other_fn=make_other,
        degrees=degrees,
        conditions=arguments.conditions,
        register=None if arguments.keep else model_type,
        exclude=[model_type] if model_type else [],
    )
    print(derived.text)
    for note in (*_sizes(make_other), *derived.notes):
        print(f"# {note}")
    print(_verdict(derived, time.monotonic() - began))
    if arguments.output is not None and derived.is_proved:
        arguments.output.write_text(derived.text, encoding="utf-8")
        print(f"written to {arguments.output}", file=sys.stderr)
    if facts is not None and derived.report is not None and derived.is_proved:
        file = keep_plan(facts, derived.plan, derived.text, _cases(derived.report))
        print(f"kept in {file}", file=sys.stderr)
    return 0 if derived.is_proved else 1


def _facts(subject: Subject, make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Return what a kept plan for the model of `subject` depends on.

    Raises:
        ConfigError: the model has no config, or the small model that is proved has another structure.
    """
    if subject.config is None:
        raise ConfigError(
            f"--keep: {subject.words} is a function, and a plan is kept for a model with a config; use --output"
        )
    facts = facts_of(modeling.build(subject.config))
    if missing := missing_in(structure_of(make()), facts["structure"]):
        raise ConfigError(
            f"--keep: the small model of {subject.words} lacks {missing}, so a proof with it would not hold; run titanplans "
            "derive my_models:small --output plan.py with a function that returns a small model of the same structure"
        )
    return facts


def _models(
    subject: Subject, other: str | None
) -> tuple[Callable[[], nn.Module], Callable[[], nn.Module] | None, str | None]:
    """Return what `derive` needs.

    Returns:
        A function that builds the model; a function that builds the model with other sizes, or None; and the model type, or
        None.
    """
    if subject.config is None:
        return _double(subject), None if other is None else _double(_subject(other)), None
    if other is not None:
        raise VerifyError(
            f"--other {other}: goes with module:function only, since a config gives models of two sizes; leave it out"
        )
    first, second = small_configs(subject.config)
    build = partial(partial, modeling.build_real, dtype=torch.float64)
    return build(first), None if second is None else build(second), first.model_type


def _double(subject: Subject) -> Callable[[], nn.Module]:
    return lambda: call_user_function(subject).double()


def _subject(words: str) -> Subject:
    """Return the subject that `words` names: a path, a job, module:function, or a model type, even one without a plan."""
    if words.endswith(".toml"):
        job = load_job([words])
        import_custom(job)
        return Subject(words, hf_config(job))
    is_name = not (":" in words or "/" in words or words.endswith(".json") or Path(words).is_dir())
    if not is_name or words in modeling.available():
        return find_model(words, None, "derive")
    if words in CONFIG_MAPPING:
        return Subject(words, default_config(words))
    names = [*modeling.available(), *CONFIG_MAPPING]
    remedy = did_you_mean(words, names, "name a config.json or module:function")
    raise ConfigError(f"derive {words}: no such model type; {remedy}")


def _class_name(words: str) -> str:
    return "".join(part.capitalize() for part in re.split(r"[\W_]+", words)) + "Plan"


def _sizes(make_other: Callable[[], nn.Module] | None) -> list[str]:
    if make_other is not None:
        return []
    return [
        "the plan writes each size as an attribute of the same value, which may be equal by chance; --other names a "
        "function that returns the model in other sizes, to exclude this"
    ]


def _verdict(derived: Derived, seconds: float) -> str:
    if derived.report is None:
        return f"NOT PROVED: the plan is refused; {counted(derived.proofs, 'proof')}, {seconds:.1f} s"
    cases = derived.report.cases
    wrong = sum(not case.passed for case in cases)
    if wrong or not cases:
        return f"NOT PROVED: {wrong} of {counted(len(cases), 'case')} wrong; {seconds:.1f} s"
    return f"proved: {_cases(derived.report)}; {seconds:.1f} s"


def _cases(report: Report) -> str:
    degrees = dict.fromkeys(str(case.options.degrees) for case in report.cases)
    return f"{counted(len(report.cases), 'case')} at {'; '.join(degrees)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="titanplans derive",
        description="Write a plan for a model from its dataflow, and prove it on a CPU.",
        epilog="exit status: 0 proved, 1 not proved, 2 can't be run as written",
        allow_abbrev=False,
    )
    add = parser.add_argument
    words = "a model type of transformers or a registered one, a config.json or its folder, a job, or module:function"
    add("model", metavar="MODEL", help=f"{words}, a function that returns a small model with random weights")
    words = "with module:function: a function that returns the same model with other widths and head counts"
    add("--other", metavar="MODULE:FUNCTION", help=words)
    add(
        "--tp",
        type=degree_list,
        metavar="2,4,8",
        help="tensor-parallel degrees to prove; default: the degrees of tp, cp and pp that verify chooses",
    )
    add("--conditions", choices=list(CONDITIONS), default="each", help="as in verify; default: each")
    add("--name", metavar="CLASS", help="name of the class; default: from the model")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--output", metavar="FILE", type=Path, help="write the class to this new file, too, if it is proved")
    words = "keep the class, if it is proved, for models of this structure with derive = true; it is not registered"
    one("--keep", action="store_true", help=words)
    return parser
