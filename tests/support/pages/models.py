"""docs/generated/models.md: all named sizes of `models/*.toml`, and the parameter counts of their models.

python docs/generate.py models.md     # writes the page
"""

import re
from collections.abc import Iterator

from torch import nn
from transformers import PretrainedConfig

from tests import zoo
from tests.support.paths import GENERATED, ROOT
from titanplans import kernels, modeling
from titanplans.split.decoder import find_decoder

PAGE = GENERATED / "models.md"
HEAD = """# Named sizes

A job names a model by `[model] name` and `flavor`. The source is the comment at the flavor's table in `models/NAME.toml`.
Most `debug` flavors are left out here; [architectures.md](architectures.md) lists them. For a mixture of experts, the
column MLP is the number of experts times the width of one expert, plus the width of the shared experts.

| model | flavor | hidden | layers | heads | key/value heads | head | MLP | vocabulary | tied | parameters | source |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the text of the page."""
    kernels.install("cpu")
    return HEAD + "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows())


def rows() -> Iterator[tuple[object, ...]]:
    """Yield the table's row of each named size."""
    for name, flavors in modeling.available().items():
        source = sources(name)
        for flavor in flavors:
            if flavor == "debug" and name in zoo.BESIDES:
                continue
            config = modeling.load_config(name, flavor)
            model = modeling.build(config)
            count = sum(p.numel() for p in model.parameters())
            text = config.get_text_config()
            heads = first(text, "num_attention_heads", "num_heads")
            yield (
                *(name, flavor, text.hidden_size, text.num_hidden_layers, heads),
                first(text, "num_key_value_heads", "num_kv_heads") or heads,
                first(text, "v_head_dim", "head_dim") or "",
                width(text) or width_of_mlp(model),
                *(f"{text.vocab_size:,}", "yes" if text.tie_word_embeddings else "no"),
                *(f"{count:,}", source.get(flavor, "")),
            )


def first(config: PretrainedConfig, *names: str) -> object:
    """Return the value of the first field of `names` that is set; None if none is set."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def width(config: PretrainedConfig) -> str:
    """Return the width of the MLP, or of each expert; "" if the config has only a ratio."""
    experts = first(config, "num_local_experts", "num_experts", "n_routed_experts")
    if experts is None:
        return str(getattr(config, "intermediate_size", None) or "")
    each = first(config, "moe_intermediate_size") or config.intermediate_size
    shared = first(config, "shared_expert_intermediate_size")
    shared = shared or (getattr(config, "n_shared_experts", None) or 0) * each
    if config.model_type == "llama4_text":
        shared = each
    return f"{experts} x {each}" + (f" + {shared}" if shared else "")


def width_of_mlp(model: nn.Module) -> int | str:
    """Return the number of inputs of the last projection of the first MLP; "" if blocks have no MLP."""
    for mlp in find_decoder(model).mlps.values():
        return [module for module in mlp.modules() if isinstance(module, nn.Linear)][-1].in_features
    return ""


def sources(name: str) -> dict[str, str]:
    """Return the source of each flavor, which is the comment next to its table's header or above it."""
    text = (ROOT / "models" / f"{name}.toml").read_text()
    headers = re.findall(r"^(?:# (.*)\n\n?)?\[\"?([\w.-]+?)\"?(?:\.text_config)?\](?: # (.*))?$", text, re.M)
    return {
        flavor: "ours" if flavor == "debug" else (comment_after or comment_above).partition(":")[0]
        for comment_above, flavor, comment_after in headers
    }
