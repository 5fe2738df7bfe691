"""`write_model_card`: the README.md of an exported folder, which says how to load the model and how it was trained."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
from huggingface_hub import ModelCardData
from safetensors import safe_open
from transformers import PretrainedConfig

from titanplans.config.schema import keys
from titanplans.disk import sync
from titanplans.hub import MODEL_CARD, repository_of
from titanplans.text import counted
from titanplans.training.checkpoint.manifest import Manifest, initial_weights_folder
from titanplans.training.data.corpus.local import is_hub_name
from titanplans.versions import versions

_SECTIONS = (
    *("model", "training", "data", "optimizer", "lr_scheduler", "loss", "lora", "quantize"),
    *("parallelism", "activation_checkpoint", "compile", "debug"),
)
"""Sections of a job about the model, the data and the training. The other sections name folders and logs."""

_CARD = """\
---
{metadata}
---

# {title}

{parameters:,} parameters of the architecture `{model_type}`{steps}.

## Load it

{usage}

## How it was trained

{training}

Exported with {versions}.
"""

_TRAINING = """\
| | |
|---|---|
| initial weights | {weights} |
| data | {data} |
| steps | {steps:,} |
| tokens per sequence | {seq_len:,} |

The options of the job that differ from their defaults:

```toml
{job}```"""


def write_model_card(
    folder: Path,
    title: str,
    config: PretrainedConfig,
    manifest: Manifest | None,
    adapted_base: str | None = None,
) -> None:
    """Write the model card of a folder that already holds the weights.

    The card names no folder of this machine: it shows only the last component of an absolute path.

    Args:
        folder: a folder of weights for transformers, or of adapters for peft.
        title: the name of the folder, or of its repository on the Hub ("owner/name"), from which the card loads the model.
        config: the model's config.
        manifest: the exported checkpoint's manifest; None if it has none.
        adapted_base: if the folder holds adapters, the folder or the repository of the weights to which they belong.
    """
    job = {} if manifest is None else manifest.job
    metadata = ModelCardData(
        library_name="transformers" if adapted_base is None else "peft",
        pipeline_tag="text-generation",
        datasets=[corpus.repository for corpus in _corpora(job) if corpus.repository] or None,
        # The Hub refuses the path of a folder here.
        base_model=_name_on_hub(adapted_base),
        tags=["titanplans", config.model_type],
    )
    is_trained = manifest is not None and bool(job)  # an imported folder has a manifest without a job
    card = _CARD.format(
        metadata=metadata.to_yaml(),
        title=title,
        parameters=_count_parameters(folder),
        model_type=config.model_type,
        steps=f", trained for {counted(manifest.step, 'step')} with titanplans"
        if manifest and is_trained
        else "",
        usage=_usage(folder, title, config, adapted_base),
        training=_training(manifest) if manifest and is_trained else "The checkpoint does not name its job.",
        versions=versions(),
    )
    path = folder / MODEL_CARD
    path.write_text(card, encoding="utf-8")
    sync(path)


def _name_on_hub(base: str | None) -> str | None:
    """Return the name of the repository of the base model, without its revision; None for a folder."""
    if base is None or os.path.isdir(base):
        return None
    return repository.name if (repository := repository_of(base)) else base


def _count_parameters(folder: Path) -> int:
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118  # not a dict
        count += sum(math.prod(shape) for shape in shapes)
    return count


def _usage(folder: Path, title: str, config: PretrainedConfig, adapted_base: str | None) -> str:
    if own_class := getattr(config, "own_class", None):
        return f"The model is an instance of `{own_class}`; `titanplans.load_weights(model, folder)` loads its weights."
    has_tokenizer = (folder / "tokenizer.json").is_file()
    imports = [f"from transformers import AutoModelForCausalLM{', AutoTokenizer' if has_tokenizer else ''}"]
    if type(config).__module__.startswith("fla."):
        imports.insert(0, "import fla  # flash-linear-attention, which registers the architecture")
    if adapted_base is None:
        calls = [f'model = AutoModelForCausalLM.from_pretrained("{title}")']
    else:
        imports.append("from peft import PeftModel")
        base = _without_folders(adapted_base)
        if (repository := repository_of(adapted_base)) is not None and repository.revision is not None:
            base = f'{repository.name}", revision="{repository.revision}'
        calls = [f'base = AutoModelForCausalLM.from_pretrained("{base}")']
        calls.append(f'model = PeftModel.from_pretrained(base, "{title}")')
    if has_tokenizer:
        calls.append(f'tokenizer = AutoTokenizer.from_pretrained("{title}")')
    return "\n".join(["```python", *imports, "", *calls, "```"])


def _training(manifest: Manifest) -> str:
    job = manifest.job
    initial = initial_weights_folder(job)
    changed = {
        key: value
        for key, value in job.items()
        if key.partition(".")[0] in _SECTIONS
        and (key not in keys() or value != _as_toml(keys()[key].default))
    }
    return _TRAINING.format(
        weights="random" if initial is None else f"`{_without_folders(initial)}`",
        data=", ".join(str(corpus) for corpus in _corpora(job)),
        steps=manifest.step,
        seq_len=job["training.seq_len"],
        job=tomli_w.dumps(_tables(_without_folders(changed))),
    )


class _Corpus(NamedTuple):
    """A data set of a job: its name or path, its split, and its repository on the Hub if it has one."""

    name: str
    split: str
    repository: str | None

    def __str__(self) -> str:
        return f"`{_without_folders(self.name)}` ({self.split})"


def _corpora(job: Mapping[str, Any]) -> Iterator[_Corpus]:
    of_training = {name: job.get(f"training.{name}") for name in ("dataset", "dataset_path", "dataset_split")}
    for source in job.get("data.sources") or ([of_training] if job else []):
        name, path, split = (source.get(key) or keys()[f"training.{key}"].default for key in of_training)
        in_hub = is_hub_name(name)
        yield _Corpus(name if in_hub else path or name, split, name.partition(":")[0] if in_hub else None)


def _without_folders(value: Any) -> Any:
    """Return a value of TOML in which absolute paths are replaced by their last component."""
    if isinstance(value, Mapping):
        return {name: _without_folders(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_folders(item) for item in value]
    return os.path.basename(value.rstrip("/")) if isinstance(value, str) and os.path.isabs(value) else value


def _as_toml(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _tables(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested tables of values by dotted key."""
    tables: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return tables
