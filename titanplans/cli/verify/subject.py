"""The model, plan and options that a SUBJECT on the command line stands for. prepare.py builds the model."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from titanplans import modeling
from titanplans.cli.verify.arguments import cuts
from titanplans.config import LoRA, strategy_of
from titanplans.errors import VerifyError
from titanplans.parallel import Float8
from titanplans.plan.custom import PlanSource
from titanplans.plan.degrees import Degrees
from titanplans.plan.plan import TPPlan
from titanplans.plan.registry import registered_plans
from titanplans.user_code import import_module, load_attribute


@dataclass(frozen=True)
class Subject:
    """A model, its plan, and the cases to prove; None stands for all degrees, or both values of an option."""

    words: str
    """The model's name in the header."""
    config: PretrainedConfig | None = None
    """None: `make` returns the model."""
    make: Callable[[], nn.Module] | None = None
    """A function of the user's own."""
    plan: PlanSource = None
    """None: the registered one."""
    degrees: tuple[Degrees, ...] | None = None
    loss_parallel: bool | None = None
    sequence_parallel: bool | None = None
    seq_len: int | None = None
    """Tokens in a job's sequence."""
    float8: Float8 = Float8()  # noqa: RUF009  frozen
    """The float8 modules of the whole model and of the split one."""
    lora: LoRA = LoRA()  # noqa: RUF009  frozen
    """The adapters of both."""
    freeze: tuple[str, ...] = ()
    """The frozen parameters of both."""


def every_model() -> list[str]:
    """Return the named models with a registered plan."""
    return [name for name in modeling.available() if name in registered_plans()]


def find_subject(words: str, request: Namespace) -> Subject:
    """Return the subject named `words`, with the options of `request`. Imports the user's modules.

    Raises:
        UserError: there is no such subject, or an option does not go with it.
    """
    is_plan = ":" in words and not words.endswith((".toml", ".json"))
    if request.model is not None and not is_plan:
        raise VerifyError(
            f"--model {request.model}: goes with a plan, as in verify my_plans:MyPlan --model gla, not with {words}"
        )
    if is_plan:
        subject = _own_plan(words, request)
    elif words.endswith(".toml"):
        subject = _job(words, request)
    else:
        subject = _model(words, request.flavor, request.command)
    if subject.degrees is None:  # else a job's, with those of the command line
        subject = replace(subject, degrees=request.degrees)
    switches = {key: getattr(request, key) for key in ("loss_parallel", "sequence_parallel")}
    chosen: dict[str, Any] = {key: value for key, value in switches.items() if value is not None}
    float8 = Float8() if request.float8 == "none" else subject.float8
    if request.float8 not in (None, "none"):
        float8 = float8.replace(recipe_name=request.float8, emulate=True)
    options = {"filter_fqns": request.float8_filter, "filter_unaligned": request.float8_filter_unaligned}
    filters: dict[str, Any] = {name: value for name, value in options.items() if value}
    if filters and float8.recipe_name is None:
        raise VerifyError(
            "--float8-filter: nothing is float8; add --float8 tensorwise, for one, or leave it out"
        )
    return replace(
        subject, **chosen, float8=float8.replace(**filters), lora=subject.lora.replace(**request.lora)
    )


def _model(words: str, flavor: str | None, option: str) -> Subject:
    """A model by a name, by the path of a config.json, or as "module:callable"."""
    named = words in modeling.available()
    is_path = not named and (words.endswith(".json") or "/" in words or os.path.isdir(words))
    if flavor is not None and (is_path or ":" in words):
        raise VerifyError(
            f"--flavor {flavor}: goes with a named model ({', '.join(modeling.available())}), not with {words}"
        )
    if ":" in words:
        return Subject(words, make=load_attribute(words, f"{option} {words}", VerifyError))
    if is_path:
        return Subject(words, modeling.load_config_file(words))
    flavor = flavor or "debug"
    return Subject(f"{words}, flavor {flavor}", modeling.load_config(words, flavor))


def _job(path: str, request: Namespace) -> Subject:
    from titanplans.config import load_job
    from titanplans.training.job.resolve import hf_config, model_name

    job = load_job([path])
    if request.flavor is not None:
        raise VerifyError(
            f"--flavor {request.flavor}: {path} says which model; change [model] there, or name the model"
        )
    if custom := job.experimental.custom_import:
        import_module(custom, f"{path}: experimental.custom_import = {custom}", VerifyError)
    degree, context = job.parallelism.tensor_parallel_degree, job.parallelism.context_parallel_degree
    experts = job.parallelism.expert_parallel_degree
    if experts > degree * context:
        context = experts // degree  # ranks that share a sequence stand for those with other batches
    stages = job.parallelism.pipeline_parallel_degree
    if degree * context * stages == 1 and request.degrees is None:
        raise VerifyError(
            f"{path}: tensor_parallel_degree = 1 splits nothing, so there is nothing to prove; give --tp 2, for one"
        )
    name, flavor = model_name(job)
    float8 = strategy_of(job).float8
    model = name if flavor == "config" else f"{name}, flavor {flavor}"
    return Subject(
        f"{path}: {model}",
        hf_config(job),
        plan=job.model.plan,
        # What the command line leaves open is as the job says.
        degrees=cuts(
            request.tp or (degree,),
            request.cp or (context,),
            request.ep or (experts,),
            request.pp or (stages,),
        ),
        loss_parallel=not job.parallelism.disable_loss_parallel,
        sequence_parallel=job.parallelism.enable_sequence_parallel,
        seq_len=job.training.seq_len,
        float8=float8.replace(  # emulated, and without FSDP's options, which split no product
            emulate=float8.recipe_name is not None,
            enable_fsdp_float8_all_gather=False,
            precompute_float8_dynamic_scale_for_fsdp=False,
        ),
        lora=strategy_of(job).lora,
        freeze=job.training.freeze,
    )


def _own_plan(words: str, request: Namespace) -> Subject:
    plan = load_attribute(words, f"{request.command} {words}", VerifyError)
    if not (isinstance(plan, dict) or (isinstance(plan, type) and issubclass(plan, TPPlan))):
        raise VerifyError(
            f"{request.command} {words}: neither a TPPlan class nor a dict of module names and styles; a model goes to "
            "--model"
        )
    if request.model is not None:
        return replace(_model(request.model, request.flavor, "--model"), plan=plan)
    named = [
        t for t, registered in registered_plans().items() if registered is plan and t in modeling.available()
    ]
    if len(named) == 1:
        return replace(_model(named[0], request.flavor, request.command), plan=plan)
    why = f"is registered for {' and '.join(named)}" if named else "is registered for no named model"
    raise VerifyError(
        f"{request.command} {words}: {why}; say which model it splits by --model: "
        f"{', '.join(named or modeling.available())}, path/to/config.json, or module:callable that returns an nn.Module"
    )
