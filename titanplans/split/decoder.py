"""Find the parts of a decoder by its structure, without importing a model library: `find_decoder`.

    decoder = find_decoder(model)
    decoder.blocks[0].mixers       # ("model.layers.0.self_attn",)

It is called once, before anything wraps a module.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import nn

from titanplans.errors import PlanError, either
from titanplans.torch_private.modules import CHECKPOINTED

_LAYER_LISTS = ("layers", "blocks", "h")
_HALVES = ("self_layers", "cross_layers")
"""The two lists of blocks of a YOCO decoder. The first list computes keys and values once, and all blocks of the second
list use them."""
_FINAL_NORMS = ("norm", "norm_f", "ln_f", "final_layernorm", "final_layer_norm", "final_norm")
HEADS = ("lm_head", "output")
_HEAD = "_head_of_plan"
MIXERS = ("attn", "self_attn", "mixer", "linear_attn", "attention", "self_attention", "mamba", "conv")
MLPS = ("mlp", "ffn", "feed_forward", "block_sparse_moe", "shared_mlp", "moe")


class AbsentModule(nn.Module):
    """Replaces a module that is on another pipeline stage."""


@dataclass(frozen=True)
class Block:
    """One block of a decoder: token mixers, MLPs and norms. Names are fully qualified.

    Most blocks have one mixer and one MLP. Falcon-H1 has attention next to Mamba 2. A block with a mixture of experts may
    also have an MLP of shared experts.
    """

    name: str
    module: nn.Module = field(compare=False, repr=False)
    mixers: tuple[str, ...]
    """The token mixers: attention, linear attention, a state-space layer."""
    mlps: tuple[str, ...]
    norms: tuple[str, ...]
    kind: str
    """The class names of the block, its mixers and its MLPs: "LlamaDecoderLayer (LlamaAttention, LlamaMLP)"."""

    def child(self, name: str) -> nn.Module:
        """Return the module of the block with the fully qualified name `name`."""
        return self.module.get_submodule("" if name == self.name else name.removeprefix(f"{self.name}."))


@dataclass(frozen=True)
class Decoder:
    """A causal language model's embedding, `ModuleList` of blocks, final norm and head, by name; None: there is none."""

    blocks: tuple[Block, ...]
    embedding: str | None = None
    norm: str | None = None
    head: str | None = None
    base: str = ""
    """The module that holds embedding, blocks and norm; "": the model itself."""
    towers: tuple[tuple[str, ...], ...] = ()
    """The names of the blocks of each tower: a list of blocks that is not the decoder's, such as a vision encoder's."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the blocks."""
        return tuple(block.name for block in self.blocks)

    @property
    def block_lists(self) -> tuple[tuple[str, ...], ...]:
        """The names of the decoder's blocks, followed by those of each tower."""
        return (self.names, *self.towers)

    @property
    def mixers(self) -> dict[str, nn.Module]:
        """The token mixers by name."""
        return {name: block.child(name) for block in self.blocks for name in block.mixers}

    @property
    def mlps(self) -> dict[str, nn.Module]:
        """The MLPs by name."""
        return {name: block.child(name) for block in self.blocks for name in block.mlps}

    def mixer_around(self, name: str) -> str | None:
        """Return the name of the token mixer that contains the module `name`, or None."""
        return next((m for block in self.blocks for m in block.mixers if name.startswith(f"{m}.")), None)


def find_decoder(model: nn.Module, *, required: bool = True) -> Decoder:
    """Return the parts of `model`.

    Args:
        model: a causal language model, on any device, split or unsplit.
        required: refuse a model without blocks. If False, its decoder is empty: `blocks` is ().

    Raises:
        PlanError: `model` has no ModuleList of blocks with a usual name, and has no outermost ModuleList, or several.
    """
    blocks = _block_names(model)
    if not blocks:
        if not required:
            return Decoder(())
        raise PlanError(
            f"{type(model).__name__} has no ModuleList of blocks named {either(_LAYER_LISTS)}, and not exactly one "
            "ModuleList that could be it: give it one of these names"
        )
    base_name = blocks[0].rpartition(".")[0].rpartition(".")[0]
    base = model.get_submodule(base_name)
    embeddings = (name for name, module in base.named_children() if isinstance(module, nn.Embedding))
    embedding, norm = next(embeddings, None), _first(_FINAL_NORMS, base)
    return Decoder(
        blocks=tuple(find_block(model.get_submodule(name), name) for name in blocks),
        embedding=None if embedding is None else join(base_name, embedding),
        norm=None if norm is None else join(base_name, norm),
        head=find_head(model),
        base=base_name,
        towers=tuple(_towers(model, blocks)),
    )


def find_head(model: nn.Module) -> str | None:
    """Return the head's name: the module to which the plan gives `vocab_head()`; without a plan, one with a usual name."""
    return model.__dict__.get(_HEAD) or _first(HEADS, model)


def set_head(model: nn.Module, head: str | None) -> None:
    """Let `find_head` return `head`, the head that the plan of `model` names; None: it names none."""
    model.__dict__[_HEAD] = head


def find_block(module: nn.Module, name: str = "") -> Block:
    """Return the parts of the block `module`, whose fully qualified name is `name`."""
    mixers, mlps = _present(MIXERS, module), _present(MLPS, module)
    classes = [type(module._modules[child]).__name__ for child in (*mixers, *mlps)]
    return Block(
        name,
        module,
        mixers=tuple(join(name, child) for child in mixers),
        mlps=tuple(join(name, child) for child in mlps),
        norms=tuple(join(name, child) for child, m in module.named_children() if "Norm" in type(m).__name__),
        kind=f"{type(module).__name__} ({', '.join(classes)})",
    )


def _block_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the blocks in the outermost list with a usual name, or else in the only outermost ModuleList."""
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in (*_LAYER_LISTS, *_HALVES)
    ]
    if not lists:
        every = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        lists = [name for name in every if not any(within(name, other) for other in every)]
        if len(lists) != 1:
            return ()
    first = min(lists, key=lambda name: name.count("."))
    base, _, name = first.rpartition(".")
    halves = [join(base, half) for half in _HALVES] if name in _HALVES else [first]
    return tuple(
        join(half, name)
        for half in halves
        if half in lists
        for name, block in model.get_submodule(half).named_children()
        if not isinstance(block, AbsentModule)
    )


def _towers(model: nn.Module, decoder: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the names of the blocks of each outermost list of blocks that is not the decoder's."""
    taken = [*decoder, *{name.rpartition(".")[0] for name in decoder}]
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in _LAYER_LISTS
        if is_list and not any(name == other or name.startswith(f"{other}.") for other in taken):
            taken.append(name)
            yield tuple(join(name, block) for block, _ in module.named_children())


def _first(names: tuple[str, ...], module: nn.Module) -> str | None:
    return next(iter(_present(names, module)), None)


def _present(names: tuple[str, ...], module: nn.Module) -> tuple[str, ...]:
    children = module._modules
    return tuple(
        name
        for name in names
        if children.get(name) is not None and not isinstance(children[name], AbsentModule)
    )


def is_fla_class(cls: type) -> bool:
    """Whether `cls` is a class of flash-linear-attention, or derived from one."""
    return any(base.__module__.startswith("fla.") for base in cls.__mro__)


def has_fla_module(module: nn.Module) -> bool:
    """Whether `module` or a module inside it is of a class of flash-linear-attention, or derived from one."""
    return any(is_fla_class(type(inner)) for inner in module.modules())


def join(*names: str) -> str:
    """Join module names with dots; empty names are left out."""
    return ".".join(name for name in names if name)


def within(key: str, module: str) -> bool:
    """Whether `key` is a name inside `module`; "" is the model itself."""
    return key != module and (key.startswith(f"{module}.") or module == "")


def is_present(key: str, absent: Collection[str]) -> bool:
    """Whether the module or parameter `key` is neither in `absent` nor inside a module in it."""
    return not any(key == name or within(key, name) for name in absent)


def without_wrappers(path: str) -> str:
    """Return the name of a module without the parts that checkpointing and compilation insert."""
    return ".".join(part for part in path.split(".") if part not in (CHECKPOINTED, "_orig_mod"))


def expand_keys(keys: Iterable[str], model: nn.Module) -> dict[str, str]:
    """For each name in `model` that matches a plan key, map the name to this key.

    In a key, `*` stands for one component of a module's name, or of a parameter's name if no module matches. A key that
    matches nothing maps to itself; `check_keys` refuses it.

    Raises:
        PlanError: two keys match one name.
    """
    key_of: dict[str, str] = {}
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for key in keys:
        names = [key]
        if any(sign in key for sign in "*?["):
            names = _matching(key, modules) or _matching(key, parameters) or names
        for name in names:
            if name in key_of:
                raise PlanError(
                    f"plan keys '{key_of[name]}' and '{key}' both match {name}: make them disjoint"
                )
            key_of[name] = key
    return key_of


def _matching(key: str, names: Iterable[str]) -> list[str]:
    parts = key.split(".")
    return [
        name
        for name in names
        if name.count(".") == len(parts) - 1 and all(map(fnmatchcase, name.split("."), parts))
    ]
