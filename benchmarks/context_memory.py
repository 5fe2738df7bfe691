"""Measure the peak of a rank's activations on fake tensors. Nothing is computed, so no length or model is too large.

The peak counts all live tensors that the forward and the backward create. Gradients of weights are not counted, because
they are dropped immediately. Blocks are recomputed and the loss is computed in chunks with the head, as in a job with long
sequences. Llama's attention is torch's flash attention, and GLA's kernel is replaced by a function that allocates the same
states. Other models use the CPU replacements of their kernels, which keep more memory.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titanplans import apply_plan, kernels, modeling
from titanplans.config import ActivationCheckpoint, load_job
from titanplans.loss import FusedLoss
from titanplans.loss import head as fused_head
from titanplans.parallel.activation_checkpoint.apply import apply_activation_checkpointing
from titanplans.proof.ranks.fake import fake_ranks
from titanplans.torch_private.dtensor import local_tensor
from titanplans.training.job.resolve import hf_config

CHUNK = 64
"""The number of tokens between two stored states of linear attention."""
MODELS = ("llama:3.1-8B", "gla:7B")


class Peak(TorchDispatchMode):
    """Counts the bytes of live fake tensors, without the weights of `model` and without tensors that have the shape of a
    weight.

    A tensor with the shape of a weight is assumed to be the gradient of a weight.

    Attributes:
        bytes: the peak so far.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        weights = [local_tensor(p) if isinstance(p, DTensor) else p for p in model.parameters()]
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._gradients = {
            shape
            for weight in weights
            for shape in (weight.shape, weight.mT.shape if weight.ndim > 1 else weight.shape)
        }
        self.bytes = self._live = 0
        self._sizes: dict[int, tuple[int, tuple[int, ...], str]] = {}
        self._at_peak: list[tuple[int, tuple[int, ...], str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(kind, FakeTensor | nn.Parameter) or kind is torch.Tensor for kind in types):
            return NotImplemented  # tensor subclasses handle the operator first
        result = func(*args, **(kwargs or {}))
        for output in tree_leaves(result):
            if (
                isinstance(output, FakeTensor)
                and output.device.type != "meta"
                and output.shape not in self._gradients
            ):
                self._count(output, str(func))
        if self._live > self.bytes:
            self.bytes, self._at_peak = self._live, list(self._sizes.values())
        return result

    @property
    def largest(self) -> list[tuple[int, tuple[int, ...], str]]:
        """Return (bytes, shape, operator) of each tensor that was live at the peak, the largest first."""
        return sorted(self._at_peak, reverse=True)

    def _count(self, tensor: torch.Tensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes and key not in self._weights:
            self._sizes[key] = size, tuple(tensor.shape), operator
            self._live += size
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        size, *_ = self._sizes.pop(key)
        self._live -= size


def peak(name: str, tokens: int, tp: int, cp: int, layers: int | None = None) -> Peak:
    """Measure the peak of one of `tp` x `cp` ranks in a step with one sequence of `tokens` tokens.

    Args:
        name: "family:flavor", or a job's TOML file.
        tokens: sequence length.
        tp: tensor-parallel degree.
        cp: context-parallel degree.
        layers: number of blocks of a named model; None: all.
    """
    kernels.install("cpu")
    _replace_kernels()
    family, _, flavor = name.partition(":")
    job = load_job([name]) if name.endswith(".toml") else None
    sizes = {} if layers is None else {"num_hidden_layers": layers}
    config = modeling.load_config(family, flavor, **sizes) if job is None else hf_config(job)
    with fake_ranks(tp * cp, cp=cp) as mesh:
        model: Any = modeling.build(config).to(torch.bfloat16)
        if tp * cp > 1:
            apply_plan(model, mesh, plan=None if job is None else job.model.plan, sum_over_cp=cp == 1)
        if not hasattr(model, "gradient_checkpointing_enable"):
            apply_activation_checkpointing(model, ActivationCheckpoint(mode="full"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = model.to_empty(device="cpu").train()
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            if hasattr(model, "gradient_checkpointing_enable"):
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            step = _step(model, torch.zeros(1, tokens, dtype=torch.long))
            step()  # warm-up: the first step creates caches
            with Peak(model) as measured:
                step()
    return measured


def _step(model: nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    fused, losses = FusedLoss(model), list[torch.Tensor]()

    def keep_loss(loss: torch.Tensor, shape: tuple[int, ...], computed: Any) -> torch.Tensor:
        losses.append(loss)
        return loss.detach().expand(shape)

    def step() -> None:
        # This function is replaced, because the stand-in for logits is not a fake tensor.
        fused_head.stand_in = keep_loss  # type: ignore[assignment]
        with fused(ids):
            model(ids)
        losses.pop().backward()

    return step


def _replace_kernels() -> None:
    import fla.layers.gla as layer
    import transformers.models.llama.modeling_llama as llama

    llama.create_causal_mask = lambda *args, **kwargs: None  # flash attention needs no mask
    layer.chunk_gla = _chunk_gla


def _chunk_gla(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, **others: Any) -> Any:
    return _LinearAttention.apply(q, k, v, g), None


class _LinearAttention(torch.autograd.Function):
    """Allocates the same tensors as flash-linear-attention's GLA kernels: one state per chunk. The backward's are in
    float32."""

    @staticmethod
    def forward(ctx: Any, q, k, v, g):
        _states(k, v, k.dtype)
        scores = q.new_empty((*q.shape[:-1], CHUNK))
        ctx.save_for_backward(q, k, v, g, scores)
        return torch.empty_like(v)

    @staticmethod
    def backward(ctx: Any, grad):  # pyrefly: ignore[bad-override]
        q, k, v, g, _ = ctx.saved_tensors
        states = [_states(k, v, torch.float32) for _ in range(2)]
        gradients = tuple(torch.empty_like(x) for x in (q, k, v, g))
        del states
        return gradients


def _states(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    batch, tokens, heads, width = k.shape
    return k.new_empty((batch, -(-tokens // CHUNK), heads, width, v.shape[-1]), dtype=dtype)
