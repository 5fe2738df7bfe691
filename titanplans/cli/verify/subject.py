"""The model, plan and options that a SUBJECT on the command line stands for. prepare.py builds the model."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from titanplans import kernels, modeling
from titanplans.cli.verify.arguments import combine_degrees
from titanplans.config import LoRA, strategy_of
from titanplans.errors import VerifyError
from titanplans.parallel import Float8
from titanplans.parallel.mesh.process_group import default_device_type
from titanplans.plan.custom import PlanSource, find_plan
from titanplans.plan.degrees import Degrees
from titanplans.plan.plan import TPPlan
from titanplans.plan.registry import registered_plans
from titanplans.user_code import import_module, load_attribute


@dataclass(frozen=True)
class Subject:
    """A model, its plan, and the cases to prove. None stands for the default degrees, or for both values of an option."""

    words: str
    """The model's name in the printed header."""
    config: PretrainedConfig | None = None
    """The model's config; None: `make` builds the model."""
    make: Callable[[], nn.Module] | None = None
    """The user's function that returns the model."""
    plan: PlanSource = None
    """The plan; None: the registered one."""
    degrees: tuple[Degrees, ...] | None = None
    loss_parallel: bool | None = None
    sequence_parallel: bool | None = None
    seq_len: int | None = None
    """Tokens per sequence in a job."""
    float8: Float8 = Float8()  # noqa: RUF009  frozen
    """The float8 conversion of the unsplit and the split model."""
    lora: LoRA = LoRA()  # noqa: RUF009  frozen
    """The adapters of both models."""
    freeze: tuple[str, ...] = ()
    """Patterns of the frozen parameters of both models."""


def every_model() -> list[str]:
    """Return the named models with a registered plan."""
    return [name for name in modeling.available() if name in registered_plans()]


def find_subject(words: str, request: Namespace) -> Subject:
    """Return the subject that `words` names, with the options of `request`. Imports the user's modules.

    Raises:
        UserError: there is no such subject, or an option does not apply to it.
    """
    is_plan = ":" in words and not words.endswith((".toml", ".json"))
    if request.model is not None and not is_plan:
        raise VerifyError(
            f"--model {request.model}: goes with a plan, as in verify my_plans:MyPlan --model gla, not with {words}"
        )
    if is_plan:
        subject = _user_plan(words, request)
    elif words.endswith(".toml"):
        subject = _job(words, request)
    else:
        subject = find_model(words, request.flavor, request.command)
    if subject.degrees is None:  # `_job` has combined the degrees of the job and the command line
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
            "--float8-filter: no module is converted to float8: add --float8 tensorwise, or remove it"
        )
    return replace(
        subject, **chosen, float8=float8.replace(**filters), lora=subject.lora.replace(**request.lora)
    )


def find_model(words: str, flavor: str | None, option: str) -> Subject:
    """Return the subject of a model's name, a path of a config.json, or "module:callable"."""
    is_named = words in modeling.available()
    is_path = not is_named and (words.endswith(".json") or "/" in words or os.path.isdir(words))
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
    from titanplans.training.job.derived import keep_derived_plan
    from titanplans.training.job.repositories import with_commits
    from titanplans.training.job.resolve import hf_config, model_name

    job = load_job([path])
    if request.flavor is not None:
        raise VerifyError(
            f"--flavor {request.flavor}: {path} sets the flavor: change [model] there, or use a model's name instead"
        )
    if custom := job.experimental.custom_import:
        import_module(custom, f"{path}: experimental.custom_import = {custom}", VerifyError)
    degree, context = job.parallelism.tensor_parallel_degree, job.parallelism.context_parallel_degree
    experts = job.parallelism.expert_parallel_degree
    if experts > degree * context:
        # A job also distributes experts over data-parallel ranks. A proof uses context-parallel ranks instead.
        context = experts // degree
    stages = job.parallelism.pipeline_parallel_degree
    if degree * context * stages == 1 and request.degrees is None:
        raise VerifyError(
            f"{path}: tensor_parallel_degree = 1 splits nothing, so nothing can be proved: add --tp 2, for example"
        )
    job = with_commits(job, resumes=False)
    config, plan = hf_config(job), job.model.plan
    if job.model.derive:
        kernels.install(_device_type(request))  # some models can't be built without them
        keep_derived_plan(job, model := modeling.build(config))
        plan = find_plan(plan, model, derive=True)
    name, flavor = model_name(job)
    float8 = strategy_of(job).float8
    model = name if flavor == "config" else f"{name}, flavor {flavor}"
    return Subject(
        f"{path}: {model}",
        config,
        plan=plan,
        # Degrees that are not set on the command line come from the job.
        degrees=combine_degrees(
            request.tp or (degree,),
            request.cp or (context,),
            request.ep or (experts,),
            request.pp or (stages,),
        ),
        loss_parallel=not job.parallelism.disable_loss_parallel,
        sequence_parallel=job.parallelism.enable_sequence_parallel,
        seq_len=job.training.seq_len,
        # float8 is emulated. The options of FSDP2 are left out, since they do not change the products.
        float8=float8.replace(
            emulate=float8.recipe_name is not None,
            enable_fsdp_float8_all_gather=False,
            precompute_float8_dynamic_scale_for_fsdp=False,
        ),
        lora=strategy_of(job).lora,
        freeze=job.training.freeze,
    )


def _device_type(request: Namespace) -> str:
    return request.device or ("cpu" if request.ranks == "threads" else default_device_type())


def _user_plan(words: str, request: Namespace) -> Subject:
    plan = load_attribute(words, f"{request.command} {words}", VerifyError)
    # With --model a function returns a plan. Without --model it may return a model.
    is_function = request.model is not None and isinstance(plan, FunctionType)
    if not (isinstance(plan, dict) or is_function or (isinstance(plan, type) and issubclass(plan, TPPlan))):
        raise VerifyError(
            f"{request.command} {words}: neither a TPPlan class nor a dict of module names and styles: use --model for a "
            "model"
        )
    if request.model is not None:
        return replace(find_model(request.model, request.flavor, "--model"), plan=plan)
    names = [
        t for t, registered in registered_plans().items() if registered is plan and t in modeling.available()
    ]
    if len(names) == 1:
        return replace(find_model(names[0], request.flavor, request.command), plan=plan)
    why = f"is registered for {' and '.join(names)}" if names else "is registered for no named model"
    raise VerifyError(
        f"{request.command} {words}: {why}: name the model with --model: {', '.join(names or modeling.available())}, "
        "path/to/config.json, or module:callable that returns an nn.Module"
    )
