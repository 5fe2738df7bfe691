"""Load a job: defaults, overridden by the TOML file, overridden by the command line. Start at `load_job`."""

import os
from pathlib import Path
from typing import Any, NoReturn

from titanplans.config.arguments import parse_arguments, usage
from titanplans.config.families import DEFAULT_FLAVOR, DEFAULT_NAME, check_plan, find_flavor
from titanplans.config.lines import KeyInFile, located
from titanplans.config.options import read_toml
from titanplans.config.other_names import MODELS_OF_OTHERS
from titanplans.config.schema import JobConfig, build_job, keys, strategy_of
from titanplans.config.translate import CONVERTERS, ParsedKeys, refuse_or_note
from titanplans.errors import ConfigError, ModelError, OptionError


def load_job(argv: list[str], command: str = "train", *, accepts_model: bool = False) -> JobConfig:
    """Return the job of a command line without the program's name and `command`.

    With `--help` or `--print-config`, print on rank 0, and end the process with status 0.

    Args:
        argv: the command line.
        command: is named in errors.
        accepts_model: a registered model may be named instead of a file. Its job is split over two tensor-parallel ranks.

    Raises:
        ConfigError: the job can't be read, contradicts itself, or names a model or flavor that does not exist.
    """
    name, options, flags = parse_arguments(argv)
    if "help" in flags:
        is_job = name is None or name.endswith(".toml") or os.path.isfile(name)
        _print_and_exit(usage(None if is_job else name))
    if name is None:
        raise ConfigError(
            f"no job file given: titanplans {command} JOB.toml [--section.key value ...], see --help"
        )
    parsed = ParsedKeys()
    if accepts_model and not name.endswith(".toml") and not os.path.exists(name):
        options = [("model.name", name), ("parallelism.tensor_parallel_degree", "2"), *options]
    else:
        parsed.add_tables(read_toml(Path(name)), KeyInFile(name, Path(name)))
    parsed.add_options(options)
    job = _resolve(parsed)
    if "print" in flags:
        _print_and_exit("".join(f"# {note}\n" for note in job.notes) + job.to_toml())
    return job


def _resolve(parsed: ParsedKeys) -> JobConfig:
    values, pending, notes = parsed.values, parsed.pending, parsed.notes
    if pending.get("training.dataset_name", "") not in ("", "default"):
        notes.append(_select_configuration(values, pending["training.dataset_name"]))
    if "training.varlen" in pending:
        notes.append(
            _documents(values, varlen=pending["training.varlen"], length=pending.get("training.context_len"))
        )
    notes += _our_model(values)
    if CONVERTERS in pending:
        recipe = values.setdefault("quantize.linear.float8.recipe_name", "tensorwise")
        notes.append(
            f'{pending[CONVERTERS]} (torchtitan): read as quantize.linear.float8.recipe_name = "{recipe}"'
        )
    notes += refuse_or_note(parsed.refused, values)
    try:
        job = build_job(values)
        strategy_of(job)
    except OptionError as error:
        section = error.option.rpartition(".")[0]  # a key in a list of tables has the location of the list
        raise located(error, parsed.locations.get(error.option, parsed.locations.get(section))) from error
    if job.model.name or job.model.flavor:
        try:
            find_flavor(job.model.name or DEFAULT_NAME, job.model.flavor or DEFAULT_FLAVOR)
        except ModelError as error:
            raise ConfigError(str(error)) from error
    if not job.experimental.custom_import:  # the user's module may register plans
        check_plan(job.model.plan)
    description = [job.job.description] if job.job.description else []
    vars(job)["notes"] = (*description, *notes)
    return job


def _select_configuration(values: dict[str, Any], name: str) -> str:
    """Append flame's training.dataset_name, a configuration, to the name of the Hugging Face data set; return the note."""
    dataset = values.get("training.dataset")
    if dataset is None or ":" in dataset:
        raise ConfigError(
            f'training.dataset_name = "{name}" (flame) needs a Hugging Face data set without a configuration; '
            f'write training.dataset = "owner/name:{name}"'
        )
    values["training.dataset"] = f"{dataset}:{name}"
    return f'training.dataset_name (flame): read as training.dataset = "{dataset}:{name}"'


def _documents(values: dict[str, Any], *, varlen: bool, length: int | None) -> str:
    """Set data.documents according to flame's training.varlen and context_len; return the note."""
    seq_len = values.get("training.seq_len", keys()["training.seq_len"].default)
    if varlen and length is not None and length < seq_len:
        raise ConfigError(
            f"training.context_len = {length} (flame): documents are divided only at the end of a sequence of "
            f"training.seq_len = {seq_len} tokens; set seq_len = {length}, or remove context_len"
        )
    documents = values.setdefault("data.documents", "apart" if varlen else "joined")
    return f'training.varlen (flame): read as data.documents = "{documents}"'


def _our_model(values: dict[str, Any]) -> list[str]:
    """Replace torchtitan's name and flavor of a model with this project's; return a list with a note if they differ."""
    name, flavor = values.get("model.name"), values.get("model.flavor")
    ours = MODELS_OF_OTHERS.get(name or "", {}).get(flavor or "")
    if ours is None:
        return []
    values["model.name"], values["model.flavor"] = ours
    return [
        f'model.name = "{name}", flavor = "{flavor}" (torchtitan): read as model.name = "{ours[0]}", flavor = "{ours[1]}"'
    ]


def _print_and_exit(text: str) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":
        print(text, end="")
    raise SystemExit(0)
