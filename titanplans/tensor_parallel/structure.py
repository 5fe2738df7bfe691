"""Where the parts of a decoder stand, found by structure: no model library is imported.

A causal language model here is an embedding, a `ModuleList` of blocks, a final norm and a head,
under whatever names. What is not found is None; who needs it says so.
"""

from dataclasses import dataclass

from torch import nn

from titanplans.errors import PlanError

_LAYER_LISTS = ("layers", "blocks", "h")
_FINAL_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm", "final_norm")
_HEADS = ("lm_head", "output")
_MIXERS = ("attn", "self_attn", "mixer", "linear_attn", "attention")
_MLPS = ("mlp", "ffn", "feed_forward")


@dataclass(frozen=True)
class Decoder:
    """Fully qualified names of a decoder's parts."""

    layers: tuple[str, ...]
    embedding: str | None
    norm: str | None
    head: str | None


def find_layers(model: nn.Module) -> tuple[str, ...]:
    """Return the fully qualified names of `model`'s blocks; none if it has no list of blocks."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in _LAYER_LISTS
    ]
    if not lists:
        return ()
    blocks = min(lists, key=lambda name: name.count("."))
    return tuple(join(blocks, name) for name, _ in model.get_submodule(blocks).named_children())


def find_mixers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the token mixers of `model`'s blocks by fully qualified name."""
    mixers = {}
    for name in find_layers(model):
        layer = model.get_submodule(name)
        if (mixer := find_mixer(layer)) is not None:
            mixers[join(name, mixer)] = layer.get_submodule(mixer)
    return mixers


def find_decoder(model: nn.Module) -> Decoder:
    """Return the names of `model`'s blocks, embedding, final norm and head.

    Raises:
        PlanError: `model` has no ModuleList of blocks under one of the usual names.
    """
    layers = find_layers(model)
    if not layers:
        raise PlanError(
            f"{type(model).__name__} has no ModuleList of blocks named {', '.join(_LAYER_LISTS)}: "
            "give the plan as a dict of module names, or override TPPlan.full_plan"
        )
    base_name = layers[0].rpartition(".")[0].rpartition(".")[0]
    base = model.get_submodule(base_name)
    return Decoder(
        layers=layers,
        embedding=next(
            (join(base_name, n) for n, m in base.named_children() if isinstance(m, nn.Embedding)), None
        ),
        norm=next((join(base_name, n) for n in _FINAL_NORMS if n in base._modules), None),
        head=next((n for n in _HEADS if n in model._modules), None),
    )


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a norm, by the name of its class."""
    return "Norm" in type(module).__name__


def find_mixer(layer: nn.Module) -> str | None:
    """Return the name of a block's token mixer."""
    return next((name for name in _MIXERS if name in layer._modules), None)


def find_mlp(layer: nn.Module) -> str | None:
    """Return the name of a block's MLP."""
    return next((name for name in _MLPS if name in layer._modules), None)


def join(*names: str) -> str:
    """Join module names with dots, leaving empty ones out."""
    return ".".join(name for name in names if name)
