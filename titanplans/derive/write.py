"""Write the plan of an analysed model as the source of a class: `write_plan`."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from titanplans.derive.analyse import (
    BlockSplit,
    ModelSplit,
    RegionSplit,
    fused_kernels_of,
    integers,
    relative,
)
from titanplans.derive.by_head import split_arguments
from titanplans.derive.probe import BUFFER
from titanplans.derive.region import float_tensors
from titanplans.derive.sections import Section
from titanplans.plan.plan import TPPlan
from titanplans.split.decoder import join, within
from titanplans.split.experts.interfaces import interface_of


@dataclass(frozen=True)
class Choices:
    """What the dataflow leaves open, and a proof decides.

    Attributes:
        sum_at_exit: names of regions whose exit sums over the ranks, although their output projection could do so.
        unsplit: names of regions that every rank runs in full.
        ends_stream: whether the residual stream ends at the final norm.
        interleaved: names of parameters or modules whose rows alternate between sections.
        counted_once: the name of the function that computes an additional loss, which every rank would add. None: there is
            no such loss.
        may_gather: names of mixers whose code may gather the hidden states of all tokens under context parallelism.
        embeds_all_tokens: whether context-parallel ranks embed all tokens, for code that adds positions to the embeddings.
        by_expert: whether experts are distributed over ranks under expert parallelism.
        shards_arguments: whether arguments that blocks combine with their hidden states have all tokens, and are sharded.
    """

    sum_at_exit: frozenset[str] = frozenset()
    unsplit: frozenset[str] = frozenset()
    ends_stream: bool = False
    interleaved: frozenset[str] = frozenset()
    counted_once: str | None = None
    may_gather: frozenset[str] = frozenset()
    embeds_all_tokens: bool = False
    by_expert: bool = True
    shards_arguments: bool = False


@dataclass(frozen=True)
class Source:
    """The source of a plan's class.

    Attributes:
        name: the name of the class.
        base: its base class.
        attributes: the lines that set class attributes.
        methods: the lines of each method, by the method's name.
    """

    name: str
    base: type[TPPlan] = TPPlan
    attributes: list[str] = field(default_factory=list)
    methods: dict[str, list[str]] = field(default_factory=dict)

    def render(self, docstring: Sequence[str], *, register: str | None = None) -> str:
        """Return the file: imports, and the class with these lines as docstring, registered for a model type, if given."""
        first, *others = docstring
        documentation = [f'"""{first}', *others, '"""'] if others else [f'"""{first}"""']
        body = [*documentation, *(["", *self.attributes] if self.attributes else [])]
        for lines in self.methods.values():
            body += ["", *lines]
        text = "\n".join(f"    {part}".rstrip() for line in body for part in _wrapped(line))
        decorator = "" if register is None else f'@register_plan("{register}")\n'
        imports = ["from titanplans import TPPlan" + (", register_plan" if register else "")]
        if self.base is not TPPlan:
            imports = ["from titanplans import register_plan"] if register else []
            imports.append(f"from {self.base.__module__} import {self.base.__name__}")
        if "prefixed(" in text:
            imports.append("from titanplans.plan.plan import prefixed")
        helpers = ""
        if "statistic=gated" in text:
            imports.insert(0, "from torch.nn.functional import silu\n")
            helpers = "\n\ndef gated(x, gate):\n    return x * silu(gate)\n"
        header = "\n".join(imports)
        return f"{header}\n\n\n{decorator}class {self.name}({self.base.__name__}):\n{text}\n{helpers}"

    def execute(self) -> type[TPPlan]:
        """Return the class. It is not registered."""
        names: dict[str, type[TPPlan]] = {}
        exec(compile(self.render(["Derived."]), f"<derived {self.name}>", "exec"), names)
        return names[self.name]


def _wrapped(line: str, width: int = 100) -> list[str]:
    """Return a line of code, divided at the commas of its outermost brackets if it is longer than `width`."""
    first = min((line.find(bracket) for bracket in "({" if bracket in line), default=-1)
    if len(line) <= width or not 0 <= first < width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    depth, begin, parts = 0, first + 1, []
    for position in range(first, len(line)):
        depth += {"(": 1, "{": 1, ")": -1, "}": -1}.get(line[position], 0)
        if (depth == 1 and line[position] == ",") or depth == 0:
            parts.append(line[begin:position].strip())
            begin = position + 1
        if depth == 0:
            # A comprehension is the only part, and must not be followed by a comma.
            comma = "," if len(parts) > 1 else ""
            inner = [
                wrapped for part in parts if part for wrapped in _wrapped(f"{indent}    {part}{comma}", width)
            ]
            return [line[: first + 1], *inner, *_wrapped(f"{indent}{line[position:]}", width)]
    return [line]


class Sizes:
    """Writes numbers as expressions of a module's attributes, which hold in two models of different sizes.

    Args:
        module: a region's module, or a block.
        other: the same module of the other model; None: there is only one model, and an expression may hold by chance.
        variable: how the written code names the module.
    """

    def __init__(self, module: nn.Module, other: nn.Module | None, variable: str):
        self._values = _size_attributes(module)
        self._others = self._values if other is None else _size_attributes(other)
        self._shapes = _shapes(module)
        self._other_shapes = self._shapes if other is None else _shapes(other)
        self._variable = variable

    def express(self, value: int, other: int | None) -> str:
        """Return an expression that is `value` in the first model, and `other` in the second one (None: not compared)."""
        other = value if other is None else other
        names = sorted((name for name in self._values if name in self._others), key=_rank)
        equal = [name for name in names if (self._values[name], self._others[name]) == (value, other)]
        if equal:
            return self._named(equal[0])
        pairs = [
            (a, b)
            for index, a in enumerate(names)
            for b in names[index:]
            if (self._values[a] * self._values[b], self._others[a] * self._others[b]) == (value, other)
        ]
        by_heads = [pair for pair in pairs if sum(map(_counts, pair)) == 1]
        shapes = [
            key for key, size in self._shapes.items() if (size, self._other_shapes.get(key)) == (value, other)
        ]
        twice = [name for name in names if (2 * self._values[name], 2 * self._others[name]) == (value, other)]
        if by_heads:
            a, b = sorted(by_heads[0], key=lambda name: not _counts(name))
            return f"{self._named(a)} * {self._named(b)}"
        if shapes:
            return self._named(min(shapes, key=len))
        if twice:
            return f"2 * {self._named(twice[0])}"
        if pairs:
            a, b = pairs[0]
            return f"{self._named(a)} * {self._named(b)}"
        return str(value)

    def _named(self, name: str) -> str:
        return f"{self._variable}.{name}"


_OTHER_MEANINGS = ("layer", "token_id", "vocab", "position", "chunk_size")
"""Parts of the names of integers that are not widths."""


def _size_attributes(module: nn.Module) -> dict[str, int]:
    found = {
        name: value
        for name, value in integers(module).items()
        if not any(word in name for word in _OTHER_MEANINGS)
    }
    linears = {
        f"{name}.in_features": m.in_features
        for name, m in module.named_children()
        if isinstance(m, nn.Linear)
    }
    return found | linears


def _shapes(module: nn.Module) -> dict[str, int]:
    return {
        f"{name}.shape[{dim}]": size
        for name, parameter in module.named_parameters()
        for dim, size in enumerate(parameter.shape)
        if not any(component.isdecimal() for component in name.split("."))
    }


def _rank(name: str) -> tuple[bool, bool, int, int]:
    """Order names of sizes: a module's own before its config's, and the hidden size, which others often equal, last."""
    return name.startswith("config."), "hidden" in name, name.count("."), len(name)


def _counts(name: str) -> bool:
    last = name.rpartition(".")[2]
    return any(word in last for word in ("num", "n_", "heads", "groups"))


class RegionWriter:
    """Writes the styles and the counts of one kind of region.

    Args:
        derived: how the region is split.
        other: the same region of a model of other sizes; None: there is none.
        choices: what a proof has decided.
        variable: how the written code names the region's module.
    """

    def __init__(self, derived: RegionSplit, other: RegionSplit | None, choices: Choices, variable: str):
        assert derived.split is not None
        self.derived, self.other, self.choices, self.variable = derived, other, choices, variable
        self.split, self.found = derived.split, derived.split.findings
        self.layout = self.split.layout
        self.closes = derived.closes and derived.region.name not in choices.sum_at_exit
        self.sizes = Sizes(derived.module, None if other is None else other.module, self.variable)
        experts = (name for name, module in derived.module.named_modules() if name and interface_of(module))
        self.experts = None if derived.mixes_tokens or not choices.by_expert else next(experts, None)
        """The name of the module of experts to which tokens can be sent; None: there is none."""

    def lines(self) -> list[str]:
        """Return the entries of the dict that the method of the plan returns, one per line."""
        by_style: dict[str, list[str]] = {}
        for key, style in sorted(self._styles().items(), key=lambda item: _place(item[1])):
            by_style.setdefault(style, []).append(key)
        lines = [f"**{self._entry()},"]
        for style, keys in by_style.items():
            if len(keys) > 3:
                names = ", ".join(f'"{key}"' for key in keys)
                lines.append(f"**dict.fromkeys(({names}), {style}),")
            else:
                lines += [f'"{key}": {style},' for key in keys]
        return lines

    def mlp_names(self) -> list[str]:
        """Return the class attributes for a plain MLP, as `TPPlan.mlp_plan` plans it; [] for any other region."""
        styles = self._styles()
        inner = [key for key, style in styles.items() if style == "self.colwise()"]
        outer = [key for key, style in styles.items() if style == "self.rowwise()"]
        if not self.closes or len(outer) != 1 or len(inner) + 1 != len(styles) or self.counts() is not None:
            return []
        names = ", ".join(f'"{name}"' for name in inner)
        return [f"mlp_in = ({names}{',' if len(inner) == 1 else ''})", f'mlp_out = "{outer[0]}"']

    def _entry(self) -> str:
        region = self.derived.region
        default = "hidden_states" if self.derived.mixes_tokens else "x"
        arguments = [] if region.hidden == default or region.positional else [f'"{region.hidden}"']
        arguments += ["may_gather=True"] if region.name in self.choices.may_gather else []
        kind = "attn" if self.derived.mixes_tokens else "mlp"
        return f"self.{kind}_{'input' if self.closes else 'region'}({', '.join(arguments)})"

    def _styles(self) -> dict[str, str]:
        """Return the style of each key: a module if all its parameters have one style, otherwise each parameter."""
        by_owner: dict[str, dict[str, str]] = {}
        for name in self.found.parameters:
            by_owner.setdefault(name.rpartition(".")[0], {})[name] = self._style(name)
        styles: dict[str, str] = {}
        for owner, own in by_owner.items():
            matrices = {name: style for name, style in own.items() if not self._is_output_bias(name)}
            # Compared without `dim`, which is the matrix's: a vector has only one dimension.
            plain = {re.sub(r"(, )?dim=\d", "", style) for style in matrices.values()}
            if owner and len(plain) == 1:
                styles[owner] = matrices[max(matrices, key=lambda name: self.found.parameters[name].ndim)]
            else:
                styles |= own
        for name in self.derived.norms:
            if not any(key == name or key.rpartition(".")[0] == name for key in styles):
                styles[name] = self._split_norm(name)
        for name in self.layout.sharded:
            if name.startswith(BUFFER):
                styles[name.removeprefix(BUFFER)] = self._style(name)
        return styles

    def _is_output_bias(self, name: str) -> bool:
        """Return whether `name` is the bias of a module whose weight is an output projection, and has its style."""
        owner = name.rpartition(".")[0]
        is_vector = name in self.found.summands and self.found.parameters[name].ndim == 1
        return is_vector and any(output.rpartition(".")[0] == owner for output in self.found.outputs)

    def _style(self, name: str) -> str:
        owner = name.rpartition(".")[0]
        if owner in self.derived.norms:
            return self._split_norm(owner)
        if owner in self.found.inner_sums:
            return "self.rowwise_in_region()"
        if name in self.found.outputs:
            dim = self.found.outputs[name].inputs
            arguments = [
                *([] if self.closes else ["reduce_output=False"]),
                *([] if dim == 1 else [f"dim={dim}"]),
            ]
            return f"self.rowwise({', '.join(arguments)})"
        if name in self.found.summands:
            return "self.added_to_sum()"
        if name in self.layout.sharded:
            return self._sharded(name, *self.layout.sharded[name])
        return "self.replicated_in_region()"

    def _sharded(self, name: str, dim: int, sections: Sequence[Section]) -> str:
        at_dim = [f"dim={dim}"] if dim else []
        if len(sections) > 1:
            return f"self.packed({', '.join([*self._sections(name, sections), *at_dim])})"
        if {name, name.rpartition(".")[0]} & self.choices.interleaved:
            return f"self.colwise({', '.join([*at_dim, 'interleaved=True'])})"
        is_shared = sections[0].slices == self.derived.shared_heads and not dim
        return f"self.kv_colwise({self.variable})" if is_shared else f"self.colwise({', '.join(at_dim)})"

    def _sections(self, name: str, sections: Sequence[Section]) -> Iterator[str]:
        for index, section in enumerate(sections):
            rows = self._express(name, index, "rows")
            if section.slices == 1:
                yield f"self.shared_heads({rows})"
            elif section.slices < self.split.units and self.derived.mixes_tokens:
                yield f"self.shared_heads({rows}, {self._express(name, index, 'slices')})"
            else:
                yield rows

    def _express(self, name: str, index: int, attribute: str) -> str:
        """Return an expression for the rows or the slices of a section of a parameter."""
        value, other = getattr(self.layout.sharded[name][1][index], attribute), None
        if self.other is not None and self.other.split is not None:
            _, sections = self.other.split.layout.sharded.get(name, (0, []))
            other = getattr(sections[index], attribute) if index < len(sections) else None
        return self.sizes.express(value, other)

    def _split_norm(self, name: str) -> str:
        kind = self.derived.norms[name]
        if kind.style == "gathered_in_region":
            return "self.gathered_in_region()"
        arguments = []
        weight = join(name, "weight")
        _, sections = self.layout.sharded.get(weight, (0, [Section(0, self.split.units)]))
        if len(sections) == 1 and sections[0].slices < self.split.units:
            is_shared = sections[0].slices == self.derived.shared_heads
            heads = f"self.kv_heads({self.variable})" if is_shared else self._express(weight, 0, "slices")
            arguments += [f"heads={heads}", f"rows={self._express(weight, 0, 'rows')}"]
        if kind.gate == "before":
            arguments.append("statistic=gated")
        if kind.groups > 1:
            arguments.append(f"groups={self._of_norm(name, 'groups')}")
        return f"self.split_norm({', '.join(arguments)})"

    def _of_norm(self, name: str, attribute: Literal["groups", "width"]) -> str:
        """Return an expression for the groups or the width of a norm."""
        other = None
        if self.other is not None and self.other.split is not None:
            other = getattr(self.other.split.findings.norms.get(name), attribute, None)
        return self.sizes.express(getattr(self.found.norms[name], attribute), other)

    def counts(self) -> str | None:
        """Return the expression that `local_attributes` or `mlp_attributes` returns; None: the code needs no counts."""
        counts, module = self.derived.counts, self.variable
        items, divided = [], []
        for name, value in counts.values.items():
            if name in counts.parts:
                items.append(f'"{name}": {self._total(counts.parts[name])}')
            elif name in counts.shared:
                rows = value // counts.shared[name]
                heads = f"self.heads_per_rank({module}.{self.derived.shared_head_name})"
                items.append(f'"{name}": {heads}{f" * {self._rows(name, rows)}" if rows > 1 else ""}')
            else:
                divided.append(name)
        for norm, kind in self.derived.norms.items():
            for attribute, meaning in kind.counts.items():
                groups = f"self.heads_per_rank({self._of_norm(norm, 'groups')})"
                if meaning == "groups":
                    items.append(f'"{norm}.{attribute}": {groups}')
                elif kind.groups == 1:
                    divided.append(f"{norm}.{attribute}")
                else:
                    width = f"{self._of_norm(norm, 'width')} // self.degree"
                    per_group = f" // {groups}" if meaning == "width of a group" else ""
                    items.append(f'"{norm}.{attribute}": {width}{per_group}')
        names = "".join(f', "{name}"' for name in divided)
        terms = [f"self.divide_by_degree({module}{names})"] if divided else []
        terms += [f"{{{', '.join(items)}}}"] if items else []
        expression = " | ".join(terms) or None
        if expression is None or self.experts is None:
            return expression
        return f"{{}} if self.options.degrees.ep > 1 else {expression}"

    def _rows(self, name: str, rows: int) -> str:
        other = None
        if self.other is not None and (heads := self.other.shared_heads) and name in self.other.counts.values:
            other = self.other.counts.values[name] // heads
        return self.sizes.express(rows, other)

    def _total(self, sections: Sequence[Section]) -> str:
        """Return the sum of a rank's rows of several sections, as an expression."""
        key, first = next(
            (name, index)
            for name, (_, all_sections) in self.layout.sharded.items()
            for index in range(len(all_sections))
            if all_sections[index : index + len(sections)] == list(sections)
        )
        terms = []
        for index, section in enumerate(sections, first):
            rows = self._express(key, index, "rows")
            if section.slices == 1:
                terms.append(rows)
            elif section.slices < self.split.units:
                heads = self._express(key, index, "slices")
                per_head = rows.removeprefix(f"{heads} * ")
                per_head = f"{rows} // {heads}" if per_head == rows else per_head
                terms.append(f"{per_head} * self.heads_per_rank({heads})")
            else:
                terms.append(f"{rows} // self.degree")
        return " + ".join(
            f"{terms.count(t)} * {t}" if terms.count(t) > 1 else t for t in dict.fromkeys(terms)
        )


def _place(style: str) -> int:
    """Order styles as plans are written: what reads the input, what all units use, what makes the output."""
    return 2 if "rowwise(" in style or "added_to_sum" in style else int("replicated" in style)


def write_plan(split: ModelSplit, name: str, choices: Choices, other: ModelSplit | None = None) -> Source:
    """Return the source of a subclass of TPPlan that splits the model.

    Args:
        split: how the model is split.
        name: the name of the class.
        choices: what the proofs so far have decided.
        other: how a model of other sizes is split. An expression for a size then has to hold in both models. None: there is
            only one model.
    """
    source = Source(name)
    twins = {} if other is None else {_identity(kind): kind for kind in other.kinds}
    by_method = _by_method(split)
    variables = {method: "attn" if kinds[0].mixes_tokens else "mlp" for method, kinds in by_method.items()}
    writers: dict[int, RegionWriter] = {
        id(kind): RegionWriter(kind, twins.get(_identity(kind)), choices, variables[method])
        for method, kinds in by_method.items()
        for kind in kinds
        if kind.split is not None and kind.region.name not in choices.unsplit
    }
    source.attributes.extend(_head_names(split.kinds))
    _add(source, "model_plan", "model", _model_plan(split, choices))
    _add(source, "layer_plan", "layer", _layer_plan(split, by_method, choices))
    for method, kinds in by_method.items():
        variable = variables[method]
        if method == "mlp_plan" and len(kinds) == 1 and id(kinds[0]) in writers:
            source.attributes.extend(names := writers[id(kinds[0])].mlp_names())
            if names:
                continue
        _add(source, method, variable, _region_plan(kinds, writers, variable))
        expressions = {id(kind): writers[id(kind)].counts() for kind in kinds if id(kind) in writers}
        attributes = {"attn_plan": "local_attributes", "mlp_plan": "mlp_attributes"}.get(method)
        if attributes and any(expressions.values()):
            _add(source, attributes, variable, _returned_by_kind(kinds, expressions, variable))
        if method == "attn_plan":
            heads = {id(kind): _heads(kind) for kind in kinds if id(kind) in writers}
            if any(_is_in_submodule(kind.head_name) for kind in kinds):
                _add(source, "heads", variable, _returned_by_kind(kinds, heads, variable))
            fused = {id(kind): _without_kernels(kind) for kind in kinds if id(kind) in writers}
            if any(fused.values()):
                _add(source, "local_functions", variable, _returned_by_kind(kinds, fused, variable))
    _add(source, "model_functions", "model", _model_functions(split, choices, other))
    return source


def _model_functions(split: ModelSplit, choices: Choices, other: ModelSplit | None) -> list[str]:
    makers = {} if choices.counted_once is None else {choices.counted_once: "self.count_once"}
    if any(has_split_arguments(kind) and kind.region.name not in choices.unsplit for kind in split.kinds):
        sizes = Sizes(split.model, None if other is None else other.model, "model")
        for name, heads in split.functions.items():
            count = sizes.express(heads, None if other is None else other.functions.get(name))
            makers[name] = f"self.heads_of_result({count})"
    if not makers:
        return []
    return ["return {", *(f'    "{name}": {maker},' for name, maker in makers.items()), "}"]


def _identity(kind: RegionSplit) -> tuple[str, type]:
    return kind.region.name, type(kind.module)


def _add(source: Source, method: str, variable: str, body: Sequence[str]) -> None:
    if body:
        source.methods[method] = [f"def {method}(self, {variable}):", *(f"    {line}" for line in body)]


def _head_names(kinds: Sequence[RegionSplit]) -> Iterator[str]:
    for attribute, default, names in (
        ("head_names", TPPlan.head_names, [kind.head_name for kind in kinds]),
        ("shared_head_names", TPPlan.shared_head_names, [kind.shared_head_name for kind in kinds]),
    ):
        last = dict.fromkeys(name.rpartition(".")[2] for name in names if name is not None)
        if not set(last) <= set(default):
            written = ", ".join(f'"{name}"' for name in last)
            yield f"{attribute} = ({written}{',' if len(last) == 1 else ''})"


def _is_in_submodule(name: str | None) -> bool:
    """Return whether an attribute is one of a module in the mixer, where `TPPlan.heads` does not look."""
    return name is not None and "." in name and not name.startswith("config.")


def _heads(kind: RegionSplit) -> str:
    names = [name for name in (kind.head_name, kind.shared_head_name) if name is not None]
    items = [f'"{name.rpartition(".")[2]}": attn.{name}' for name in names]
    return f"{{{', '.join(items)}}}"


def _by_method(split: ModelSplit) -> dict[str, list[RegionSplit]]:
    """Return the kinds of regions by the method that plans them: `attn_plan`, `mlp_plan`, or one named after the region."""
    found: dict[str, list[RegionSplit]] = {}
    for block in split.blocks:
        for name, kind in block.regions.items():
            method = _method(block, name)
            if not any(kind is other for other in found.setdefault(method, [])):
                found[method].append(kind)
    order = ("attn_plan", "mlp_plan")
    return dict(
        sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
    )


def _method(block: BlockSplit, name: str) -> str:
    if name in [relative(block.block, mixer) for mixer in block.block.mixers]:
        return "attn_plan"
    if name in [relative(block.block, mlp) for mlp in block.block.mlps]:
        return "mlp_plan"
    return re.sub(r"\W", "_", name) + "_plan"


def _model_plan(split: ModelSplit, choices: Choices) -> list[str]:
    decoder = split.decoder
    first = min(split.calls[block.block.name].order for block in split.blocks)
    logits = float_tensors(split.calls[""].output)[0]
    known = {decoder.embedding, decoder.norm, decoder.head}
    styles = {}
    for name, module in split.model.named_modules():
        in_block = any(name == block.block.name or within(name, block.block.name) for block in split.blocks)
        if name in known or in_block or not any(True for _ in module.parameters(recurse=False)):
            continue
        call = split.calls.get(name)
        is_before = call is None or call.order < first
        if call is not None and decoder.head is None and _is_same(call.output, logits):
            styles[name] = "self.vocab_head()"
        else:
            styles[name] = "self.replicated_off_stream()" if is_before else "self.replicated_on_stream()"
    if choices.embeds_all_tokens and decoder.embedding is not None:
        styles[decoder.embedding] = "self.vocab_embedding(all_tokens=True)"
    if choices.ends_stream and decoder.norm is not None:
        styles[decoder.norm] = "self.end_of_stream()"
    if not styles:
        return []
    entries = [f'    "{name}": {style},' for name, style in styles.items()]
    return ["return super().model_plan(model) | {", *entries, "}"]


def _is_same(output: object, logits: torch.Tensor) -> bool:
    return isinstance(output, torch.Tensor) and torch.equal(output, logits)


def _layer_plan(
    split: ModelSplit, by_method: Mapping[str, Sequence[RegionSplit]], choices: Choices
) -> list[str]:
    """Return the body of `layer_plan`: norms without a usual name, other regions than mixer and MLP, arguments of blocks."""
    names: dict[str, None] = {}
    others: dict[str, str] = {}
    for block in split.blocks:
        norms = {relative(block.block, norm) for norm in block.block.norms}
        names |= dict.fromkeys(name for name in block.on_stream if name not in norms)
        others |= {
            name: method
            for name in block.regions
            if (method := _method(block, name)) not in ("attn_plan", "mlp_plan")
        }
    arguments = stream_arguments(split) if choices.shards_arguments else []
    if not names and not others and not arguments:
        return []
    lines = {name: f'plan["{name}"] = self.replicated_on_stream()' for name in names}
    lines |= {
        name: f'plan |= prefixed("{name}", self.{method}(layer.get_submodule("{name}")))'
        for name, method in others.items()
    }
    body = ["plan = super().layer_plan(layer)"]
    for name, line in lines.items():
        without = [block.block.module for block in split.blocks if name not in _names(block.block.module)]
        body += [f"if {_test('layer', name, without)}:", f"    {line}"] if without else [line]
    if arguments:
        quoted = ", ".join(f'"{name}"' for name in arguments)
        body.append(f'plan[""] = self.stream_arguments({quoted})')
    return [*body, "return plan"]


def stream_arguments(split: ModelSplit) -> list[str]:
    """Return the arguments that blocks combine with their hidden states."""
    return list(dict.fromkeys(name for block in split.blocks for name in block.stream_arguments))


def _region_plan(
    kinds: Sequence[RegionSplit], writers: Mapping[int, RegionWriter], variable: str
) -> list[str]:
    bodies = {}
    for kind in kinds:
        if id(kind) in writers:
            body = _returned(writers[id(kind)].lines(), writers[id(kind)].experts)
        elif kind.mixes_tokens:
            argument = "" if kind.region.hidden == "hidden_states" else f', "{kind.region.hidden}"'
            body = [f"return self.unsplit({variable}{argument})"]
        else:
            body = [f'return self.each_of({variable}, "", self.replicated_on_stream())']
        bodies[id(kind)] = body
    return _branches(kinds, bodies, variable)


def _returned(lines: Sequence[str], experts: str | None) -> list[str]:
    """Return the lines that return a dict of these entries; under expert parallelism, `experts` are distributed."""
    entries = [*(f"    {line}" for line in lines), "}"]
    if experts is None:
        return ["return {", *entries]
    return [
        "plan = {",
        *entries,
        "if self.options.degrees.ep > 1:",
        f'    plan = {{name: style for name, style in plan.items() if not name.startswith("{experts}.")}}',
        f'    plan["{experts}"] = self.by_expert()',
        "return plan",
    ]


def _without_kernels(kind: RegionSplit) -> str | None:
    """Return what `local_functions` returns, so that no fused kernel computes a sum over all units; None: there is none."""
    items = ", ".join(f'"{name}": self.without_kernel' for name in fused_kernels_of(kind.module))
    return f"{{{items}}}" if items else None


def _returned_by_kind(
    kinds: Sequence[RegionSplit], expressions: Mapping[int, str | None], variable: str
) -> list[str]:
    bodies = {id(kind): [f"return {expressions.get(id(kind)) or '{}'}"] for kind in kinds}
    return _branches(kinds, bodies, variable)


def _branches(kinds: Sequence[RegionSplit], bodies: Mapping[int, Sequence[str]], variable: str) -> list[str]:
    """Return the body of a method for several kinds of modules, which are told apart by a name that only one of them has."""
    distinct: list[RegionSplit] = []
    for kind in kinds:
        if not any(bodies[id(kind)] == bodies[id(other)] for other in distinct):
            distinct.append(kind)
    # The last one needs no test, so it is one without a name of its own.
    distinct = sorted(distinct, key=lambda kind: not _own_names(kind, distinct))
    body: list[str] = []
    for kind in distinct[:-1]:
        test = _mark(kind, [other for other in distinct if other is not kind], variable)
        body += [f"if {test}:", *(f"    {line}" for line in bodies[id(kind)])]
    return [*body, *bodies[id(distinct[-1])]]


def _mark(kind: RegionSplit, others: Sequence[RegionSplit], variable: str) -> str:
    if own := _own_names(kind, others):
        name = min(own, key=lambda name: (name.count("."), len(name), name))
        return _test(variable, name, [other.module for other in others])
    return f'type({variable}).__name__ == "{type(kind.module).__name__}"'


def _own_names(kind: RegionSplit, others: Iterable[RegionSplit]) -> set[str]:
    """Return the names of submodules and parameters that only this kind of module has."""
    return _names(kind.module).difference(*(_names(other.module) for other in others if other is not kind))


def _names(module: nn.Module) -> set[str]:
    """Return the names of the submodules and parameters of a module."""
    return {name for name, _ in (*module.named_modules(), *module.named_parameters()) if name}


def _test(variable: str, name: str, others: Iterable[nn.Module]) -> str:
    """Return an expression for whether a module has a submodule or parameter of this name, which none of `others` has."""
    owner, _, last = name.rpartition(".")
    holder = join(variable, owner)
    # Code may set an attribute to None where a module lacks a part that others have.
    if any(owner in ("", *_names(other)) and hasattr(other.get_submodule(owner), last) for other in others):
        return f'getattr({holder}, "{last}", None) is not None'
    return f'hasattr({holder}, "{last}")'


def has_split_arguments(kind: RegionSplit) -> bool:
    """Return whether units of the region use different slices of an argument, such as a bias by head."""
    return kind.split is not None and bool(split_arguments(kind.split))
