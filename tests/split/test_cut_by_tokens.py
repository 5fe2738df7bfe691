"""The seam between a plan and a cut: another cut, by tokens, of the same plans, with the same gradients as the whole model.

A rough one, for mixers alone: each rank has all weights and its tokens, and exchanges them for heads around the kernel
(DeepSpeed-Ulysses, arXiv:2309.14509). What it leaves out is no limit of the seam: lengths that the ranks don't divide,
fused kernels that read `o_proj.weight`, embeddings of own tokens alone. Nothing in `titanplans.plan` knows of it.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from equal import summed_cross_entropy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from worlds import run

from titanplans import kernels
from titanplans.apply.apply import split
from titanplans.apply.check import check
from titanplans.plan.custom import resolve_plan
from titanplans.plan.layout import Layout, Rows, Run, StreamLayout, shard_size
from titanplans.plan.plan import TPOptions
from titanplans.plan.styles.norms import GatheredInRegion, SplitNorm
from titanplans.plan.styles.projections import Colwise, Rowwise
from titanplans.plan.styles.region import Region
from titanplans.plan.styles.replicated import ReplicatedInRegion
from titanplans.plan.styles.vocab import VocabEmbedding, VocabHead
from titanplans.split.collectives import exchange, gather
from titanplans.split.gradients import align_gradients
from titanplans.split.local_code import PlaceInGroup
from titanplans.split.parameters.local_parameters import ParameterMemo, localize
from titanplans.split.stream import Border, Stream
from titanplans.split.tensors.cut import rule_of
from titanplans.split.tensors.rules import on_input, on_output

RANKS = 2


class LooksWhole(torch.Tensor):
    """A sequence [batch, tokens, width] of which this rank holds a shard; code that reads its numbers gathers it."""

    def __new__(cls, shard, border):
        shape = list(shard.shape)
        shape[1] = border.stream.length
        made = torch.Tensor._make_subclass(cls, shard.detach().new_zeros(()).expand(shape))
        made.shard, made.border = shard, border
        return made

    def gathered(self):
        return gather(self.shard, 1, self.border.stream.length, self.border.group)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("__get__", "size", "dim", "numel"):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        real = [x.gathered() if isinstance(x, LooksWhole) else x for x in args]
        return func(*real, **(kwargs or {}))


def shard_of(x):
    return x.shard if isinstance(x, LooksWhole) else x


class CutByTokens:
    def __init__(self, mesh, decoder):
        self.mesh, self.decoder, self.memo = mesh, decoder, ParameterMemo()
        self.border = Border(mesh, Stream(StreamLayout(1)))
        self.place = PlaceInGroup(self.border.rank, mesh.size(), self.border.group)

    def counts(self, module):
        return module in self.decoder.mixers

    def _inside(self, entry):
        return self.decoder.mixer_around(entry.key) is not None

    def lay_out(self, entry):
        layouts = {}
        for name, layout in entry.layouts.items():
            embeds = isinstance(entry.style, VocabEmbedding)
            rows = layout.rows
            product = entry.parameter is None and isinstance(entry.module, nn.Linear)
            if product or not self._inside(entry):
                rows = None
            elif rows is None and isinstance(layout.placement, Shard):
                size = entry.module._parameters[name].shape[layout.placement.dim]
                rows = Rows(layout.placement.dim, (Run(0, shard_size(size, self.mesh.size()), size),))
            layouts[name] = Layout(Replicate(), Replicate() if embeds else Partial(), rows=rows)
        localize(entry.module, self.mesh, layouts, self.memo)

    def install(self, entry, border):
        style, module = entry.style, entry.module
        if isinstance(style, VocabEmbedding) and style.begins_stream:
            module.register_forward_hook(lambda m, args, out: border.begin(out))
        if isinstance(style, VocabHead):
            module.register_forward_hook(lambda m, args, out: border.end(out))
        if not (self._inside(entry) or entry.key in self.decoder.mixers):
            return
        match style:
            case Region():
                module.register_forward_pre_hook(self._enter(style), with_kwargs=True)
                module.register_forward_hook(lambda m, args, out: on_output(shard_of, out))
            case Colwise() if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda m, args: (args[0].shard,))
                module.register_forward_hook(self._to_heads(entry))
            case Rowwise():
                module.register_forward_pre_hook(lambda m, args: (self._to_tokens(args[0]),))
                if not style.reduce_output:
                    module.register_forward_hook(lambda m, args, out: LooksWhole(out, self.border))
            case ReplicatedInRegion() if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda m, args: (args[0].shard,))
                module.register_forward_hook(lambda m, args, out: LooksWhole(out, self.border))
            case SplitNorm() | GatheredInRegion():
                rule_of(style).install(style, module, border)

    def _enter(self, style):
        def enter(module, args, kwargs):
            given = {**kwargs, **style.arguments}
            return on_input(
                lambda x: LooksWhole(x, self.border), style, style.input_name, module, args, given
            )

        return enter

    def _to_heads(self, entry):
        """Exchange own tokens' outputs of all heads for all tokens' outputs of own heads."""
        layout, outputs = entry.layouts["weight"], entry.module.out_features
        even = (Run(0, outputs // self.mesh.size(), outputs),)
        runs = even if layout.rows is None else layout.rows.runs

        def to_heads(module, args, out):
            ranks = range(self.mesh.size())
            sent = [torch.cat([out.narrow(-1, run.at(r), run.of(r)) for run in runs], -1) for r in ranks]
            return torch.cat(exchange(torch.stack(sent), self.border.group).unbind(), 1)

        return to_heads

    def _to_tokens(self, x):
        """Exchange all tokens' inputs of own heads for own tokens' inputs of all heads."""
        sent = torch.stack(x.chunk(self.mesh.size(), 1))
        return torch.cat(exchange(sent, self.border.group).unbind(), -1)


def gradients(model):
    align_gradients(model.parameters())
    whole = {}
    for name, param in model.named_parameters():
        grad = param.grad
        whole[name] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return whole


def difference(rank, name):
    kernels.install("cpu")
    torch.manual_seed(0)
    model = zoo.build(name).double()
    inputs = zoo.inputs(name, seq_len=32)
    labels = torch.roll(inputs["input_ids"], -1, 1)
    summed_cross_entropy(model(**inputs).logits, labels).backward()
    expected = {key: param.grad.clone() for key, param in model.named_parameters()}
    model.zero_grad()
    options = TPOptions(RANKS, loss_parallel=False)
    checked = check(resolve_plan(None, model, options), model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    split(checked, CutByTokens(mesh, checked.plan.decoder))
    summed_cross_entropy(model(**inputs).logits, labels).backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    return {
        key: ((found[key] - grad).abs().max() / grad.abs().max().clamp(min=1e-30)).item()
        for key, grad in expected.items()
    }


@pytest.mark.parametrize("name", ["qwen3", "gla", "mamba2"])
def test_the_same_plan_is_cut_by_tokens(name):
    worst = run(partial(difference, name=name), RANKS)
    # Sums in another order, in float64; FLA's norms compute in float32.
    assert max(worst.values()) < 1e-6, {key: off for key, off in worst.items() if off > 1e-6}
