"""The table of proofs, made from tests/zoo.py: rows for each architecture and each variant of its config.

tests/plans/test_proofs.py proves each row, most rows with one plain step. tests/proof tests the other conditions (padding,
documents, lengths, ...).
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from tests import zoo
from titanplans import kernels, modeling, proof
from titanplans.modeling.samples import build_real, sample_inputs
from titanplans.parallel import Float8, convert_to_float8
from titanplans.proof import Report
from titanplans.split.converted import RECIPES


class Row(NamedTuple):
    """The arguments of a proof: the config of a model, and how the model is split."""

    name: str
    variant: str
    fields: dict[str, Any]
    degrees: tuple[int, ...] = (2, 4)
    loss: bool | None = None
    sequence: bool | None = None
    """True: the sequence is sharded. False: it is replicated. None: both are proved. `loss` has the same values for
    the logits."""
    seq_len: int = 16
    recipe: str | None = None
    """The float8 recipe of the unsplit and the split model."""
    unconverted: tuple[str, ...] = ()
    conditions: str = "plain"
    """An argument of `verify`. "each" proves every condition at the smallest degree."""
    exhaustive: bool = False

    @property
    def thorough(self) -> bool:
        """Whether only `make test-all` proves the row. `make test` proves one row for each kind of mixer."""
        return QUICK.get(self.name) != self.variant

    @property
    def id(self) -> str:
        return f"{self.name}-{self.variant}-tp{'.'.join(map(str, self.degrees))}"

    def build(self) -> nn.Module:
        """Return the model, with weights, in float64."""
        kernels.install("cpu")
        model = build_real(modeling.load_config(self.name, "debug", **self.fields))
        if self.recipe is not None:
            options = {"filter_fqns": self.unconverted, "filter_unaligned": self.conditions == "each"}
            convert_to_float8(model, Float8(recipe_name=self.recipe, emulate=True, **options))
        return model

    def inputs(self, batch_size: int = 2, seq_len: int = 0, seed: int = 0) -> dict[str, Any]:
        """Return a batch of at least `self.seq_len` tokens. Conditions may ask for fewer, but gemma3's image needs them."""
        config = modeling.load_config(self.name, "debug", **self.fields)
        length = max(seq_len, self.seq_len)
        return sample_inputs(config, batch_size=batch_size, seq_len=length, seed=seed)

    def prove(self, **changed: Any) -> Report:
        """Return the report of `verify`; `changed` overrides its arguments."""
        proves_each = self.conditions == "each"
        sampler = None if self.name != "gemma3" else self.inputs
        options = {
            "degrees": self.degrees,
            "loss_parallel": self.loss,
            "sequence_parallel": self.sequence,
            "inputs": sampler if proves_each else self.inputs(),
            "conditions": self.conditions,
        }
        return proof.verify(self.build, **options | changed)


_SOFTMAX = {
    "transformer": "plain",
    "qwen3": "options",
    "gemma3": "options",
    "falcon": "1-sharded",
    "mla": "0-sharded",
}
_LINEAR = {"gla": "options", "linear_attn": "0-sharded", "retnet": "0-sharded", "lightnet": "0-sharded"}
_DELTA = {
    "gated_deltanet": "1-sharded",
    "kda": "1-sharded",
    "gated_deltaproduct": "1-sharded",
    "comba": "1-sharded",
}
_STATE = {
    "mamba": "1-sharded",
    "mamba2": "1-sharded",
    "mamba3": "1-sharded",
    "hgrn2": "0-sharded",
    "samba": "0-sharded",
}
_RWKV = {"rwkv6": "1-sharded", "rwkv7": "1-sharded", "rodimus": "1-sharded"}
_SLOTS = {"gsa": "0-sharded", "abc": "0-whole", "raven": "1-sharded", "mom": "0-sharded"}
_SPARSE = {
    "nsa": "0-sharded",
    "moba": "0-sharded",
    "cat": "0-sharded",
    "yoco": "1-sharded",
    "bitnet": "0-sharded",
}
_EXPERTS = {
    "mixtral": "0-sharded",
    "deepseek_v3": "1-sharded",
    "gpt_oss": "0-sharded",
    "qwen3_next": "0-sharded",
}
QUICK = _SOFTMAX | _LINEAR | _DELTA | _STATE | _RWKV | _SLOTS | _SPARSE | _EXPERTS | {"llama": "tensorwise"}
"""By architecture, the variant that `make test` proves. There is at least one for each kind of mixer, and one in
float8."""


def rows() -> list[Row]:
    """Return all rows, sorted by architecture."""
    table = [*_architectures(), *_options(), *_odd_sizes(), *_heads(), *_families(), *_float8()]
    return sorted(table, key=lambda row: row.name)


def _architectures() -> Iterator[Row]:
    """Yield rows for every combination of loss and sequence parallelism, with all options that change a style."""
    for name, (sizes, options) in zoo.ARCHITECTURES.items():
        yield Row(name, "options", sizes | options, (8,))
        yield Row(name, "options", sizes | options, (2, 4), exhaustive=True)


def _families() -> Iterator[Row]:
    """Yield two rows for each variant: with loss and sequence sharded, and with neither. Most of the latter are
    exhaustive."""
    for name, variants in zoo.FAMILIES.items():
        for index, fields in enumerate(variants):
            # CAT's code changes the number of tokens, and only 2 ranks divide each of its lengths.
            degrees = (2,) if name == "cat" else (2, 4)
            yield Row(name, f"{index}-sharded", fields, degrees, loss=True, sequence=True)
            whole = f"{index}-whole"
            yield Row(name, whole, fields, loss=False, sequence=False, exhaustive=QUICK.get(name) != whole)


SINGLE = {
    "transformer": {
        "plain": {},
        "window": dict(window_size=7),
        "tied": dict(tie_word_embeddings=True),
        "unfused": dict(fuse_norm=False, fuse_swiglu=False),
        "powlu": dict(hidden_act="powlu"),
        "padding": dict(pad_token_id=5),
        "residual mixing": dict(attnres_block_size=2, num_hidden_layers=2),
    },
    "gla": {
        "plain": {},
        "ungated": dict(use_output_gate=False),
        "other gate": dict(hidden_act="swish", fuse_norm=False),
        "feature map": dict(feature_map="relu"),
        "clamped": dict(clamp_min=-0.3),
        "no affine": dict(elementwise_affine=False),
        "tied": dict(tie_word_embeddings=True),
        "unfused": dict(fuse_norm=False, fuse_swiglu=False),
        "residual mixing": dict(attnres_block_size=2, num_hidden_layers=2),
        "hybrid": dict(
            num_hidden_layers=2,
            attn=dict(layers=[1], num_heads=8, num_kv_heads=4, qkv_bias=True, window_size=None),
        ),
    },
}
"""Config options that the rows named "options" leave out. Each of them gets a row of its own."""


def _options() -> Iterator[Row]:
    for name, single in SINGLE.items():
        for variant, fields in single.items():
            fields = zoo.ARCHITECTURES[name].sizes | {"num_hidden_layers": 1} | fields
            yield Row(name, variant, fields, (8,), loss=True)
            yield Row(name, variant, fields, (2,), loss=True, exhaustive=True)


IN_WORLDS = ("llama", "qwen2", "qwen3", "gemma3_text")
"""Architectures that tests/proof/ranks/test_threads.py proves at odd sizes, at tp 2 and 4."""


def _odd_sizes() -> Iterator[Row]:
    """Yield rows with widths and vocabularies that the degree does not divide.

    gemma3 keeps its vocabulary, which has image tokens.
    """
    for name, (sizes, options) in zoo.ARCHITECTURES.items():
        odd = {"intermediate_size": 45} if name == "gemma3" else zoo.ODD
        fields = sizes | options | odd
        yield Row(name, "odd", fields, (4,), exhaustive=name in IN_WORLDS)
        if name != "gemma3":
            yield Row(name, "odd", fields, (2, 8), exhaustive=True)


def _heads() -> Iterator[Row]:
    """Yield rows with more ranks than key/value heads, with the head counts of Qwen3-0.6B and Gemma3-1B."""
    qwen3, gemma3 = zoo.ARCHITECTURES["qwen3"], zoo.ARCHITECTURES["gemma3_text"]
    fields = dict(num_attention_heads=16, head_dim=4, num_hidden_layers=1)
    yield Row("qwen3", "shared heads", qwen3.sizes | qwen3.options | fields, (16,))
    fields = dict(num_attention_heads=4, num_key_value_heads=1)
    yield Row("gemma3_text", "shared heads", gemma3.sizes | gemma3.options | fields, (4,))


_ALIGNED = dict(num_hidden_layers=1, intermediate_size=64, vocab_size=128)
FLOAT8 = {
    "transformer": (_ALIGNED | dict(hidden_size=256, num_kv_heads=2), ()),
    "gla": (_ALIGNED | dict(hidden_size=256, num_kv_heads=2), ()),
    "llama": (_ALIGNED | dict(num_key_value_heads=2), ()),
    "mistral": (_ALIGNED, ()),
    "qwen2": (_ALIGNED | dict(hidden_size=128, num_key_value_heads=2), ()),
    "qwen3": (_ALIGNED | dict(num_key_value_heads=2), ()),
    "gemma3_text": (_ALIGNED | dict(num_key_value_heads=2), ()),
    "gemma3": (dict(num_hidden_layers=1, intermediate_size=64), ("vision_tower",)),
}
"""By architecture: config fields that make each local size at tp 4 a multiple of 16, and the modules that are not converted
to float8."""
FLOAT8_FAMILIES = {
    "gated_deltanet": (_ALIGNED, ()),
    "gsa": (_ALIGNED | dict(hidden_size=128), ("o_proj",)),  # the fused kernel uses its weight
    "phi3": (_ALIGNED | dict(hidden_size=128), ()),
    "glm4": (_ALIGNED, ()),
    "mamba": (dict(num_hidden_layers=1, hidden_size=128, vocab_size=128, use_bias=True), ()),
}
"""The same for models with packed projections, and for a model with a bias in its output projection."""


def float8(name: str, recipe: str = "tensorwise", variant: str = "", **changed: Any) -> Row:
    """Return the row of a model in float8. The unsplit model is in float8, too, so both have the same quantisation error."""
    fields, unconverted = (FLOAT8 | FLOAT8_FAMILIES)[name]
    options = {"degrees": (4,), "loss": True, "recipe": recipe, "unconverted": unconverted}
    return Row(name, variant or recipe, zoo.fields(name) | fields, **options | changed)


def _float8() -> Iterator[Row]:
    for name in FLOAT8:
        yield float8(name)
    for name in ("gla", "transformer", "qwen3"):
        for recipe in RECIPES[1:]:
            yield float8(name, recipe, sequence=True)
    # gk_proj is not converted, so it gets its input in high precision. Each converted projection casts its input itself.
    yield float8("gla", variant="tensorwise but one", degrees=(2,), unconverted=("gk_proj",))
    # Padding is removed before the projections, so their scales are computed from the other tokens.
    first = ("gla", "llama", *FLOAT8_FAMILIES)
    for name in FLOAT8 | FLOAT8_FAMILIES:
        options = {"degrees": (2,), "sequence": True, "conditions": "each", "exhaustive": name not in first}
        yield float8(name, variant="tensorwise in each condition", **options)
