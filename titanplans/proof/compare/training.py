"""Train an unsplit or a split model with the same code, point by point. Start at `TrainingRun.points`.

A point is a moment at which the two models are compared: after a micro batch's backward (loss and logits), after a step's
backwards (gradients and their norm), after the last step (weights), and after each forward without a backward (logits).

In the last step all forwards run before one backward of all losses, and frozen and trained parameters are exchanged. The
stages of a pipeline run all steps but the first in the order of a schedule.
"""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from titanplans.adapters.low_rank import draws
from titanplans.loss import IGNORED, DeferredLogits, FusedLoss, added_loss
from titanplans.proof.batches.sample import Sample
from titanplans.proof.batches.script import Script
from titanplans.proof.compare.forward import (
    Loss,
    at_logits,
    call,
    continued,
    evaluate,
    loss_of,
    widened,
)
from titanplans.proof.compare.pipeline import PipelinedModel, run_in_order
from titanplans.proof.compare.record import Recorder
from titanplans.split.decoder import Decoder
from titanplans.split.gradients import align_gradients, local_of, total_norm
from titanplans.split.stages.stage import Stage
from titanplans.split.stages.trace import logits_of
from titanplans.split.state import border_of_model
from titanplans.torch_private.pipelining import SPLITS_BACKWARD

Key = tuple[str, str]
"""A quantity's kind ("loss", "gradients", …), and a parameter's name, or "" if the kind has one quantity only."""


class TrainingRun:
    """The training of one model on the batches of a `Script`.

    Args:
        model: unsplit or split. It is changed, and should not be used afterwards.
        script: the inputs.
        losses: further losses by name, compared at the logits.
        recording: record the modules' outputs and their gradients.
        fused: the head computes the loss in the last step.

    Attributes:
        records: a recorder for each micro batch and each forward, by the name of the point; {} unless recording.
        raw: gradients of the newest step by name, as the backward left them: Partial ones are not summed.
        optimizer: fused AdamW, as in torchtitan; in float64 with torch's defaults.
        adds_loss: the model has added a loss, such as a router's, to the cross entropy.
    """

    def __init__(
        self,
        model: nn.Module,
        script: Script,
        losses: Mapping[str, Loss] | None = None,
        *,
        recording: bool = False,
        fused: bool = False,
    ):
        # The last stage makes the logits.
        self._last = model.stages[-1].model if isinstance(model, PipelinedModel) else model
        self._fused = FusedLoss(self._last) if fused else None
        self._draws = draws(model)
        self.model, self.script, self.losses, self.recording = model, script, losses or {}, recording
        self._point, self.adds_loss = "the first step", False
        self.records: dict[str, Recorder] = {}
        self.raw: dict[str, torch.Tensor] = {}
        # AdamW gets local tensors, since dispatching its operators on DTensors would take longer than the step itself.
        self._shards = {p: _local(p.detach()).requires_grad_() for p in model.parameters() if p.requires_grad}
        settings = _settings(next(model.parameters()).dtype)
        self.optimizer = torch.optim.AdamW(self._shards.values(), fused=True, **settings)

    def points(self) -> Iterator[tuple[str, dict[Key, torch.Tensor]]]:
        """Train, and yield the name of each point with its quantities, which have the model's placements."""
        last = len(self.script.steps)
        for number, step in enumerate(self.script.steps, 1):
            self.model.zero_grad()
            if number == last and self.script.thaws:
                for param in filter(torch.is_floating_point, self.model.parameters()):
                    param.requires_grad_(not param.requires_grad)
            name = f"step {number}"
            batches = {f"{name}, batch {at}": sample for at, sample in enumerate(step, 1)}
            tokens = int(sum((sample.labels != IGNORED).sum() for sample in step))
            if number == last or self._schedule(name + ",") is not None:
                yield from self._batches(batches, tokens)
            else:
                for batch in batches.items():
                    yield from self._batches(dict([batch]), tokens)
            self._point = f"{name}, after its backward"
            named = dict(self.model.named_parameters())
            self.raw = {n: p.grad for n, p in named.items() if p.grad is not None}
            align_gradients(self.model.parameters())
            if isinstance(self.model, PipelinedModel):
                self.model.shared.sum_gradients()
            gradients = {("gradients", n): p.grad for n, p in named.items() if p.grad is not None}
            yield name, {**gradients, ("norm", ""): total_norm(named.values())}
            for param, shard in self._shards.items():
                shard.grad = None if param.grad is None else _local(param.grad, param)
            self.optimizer.step()
            if number == 1:
                yield from self._evaluation()
            if number == min(2, last):
                yield from self._continuation()
        named = self.model.named_parameters()
        weights = {("AdamW", name): param.detach() for name, param in named if param.is_floating_point()}
        yield "the end", weights

    @property
    def place(self) -> str:
        """Where the training is, or where it has failed, in words: the point, and the module if modules are recorded."""
        record = self.records.get(self._point)
        if record is None:
            return f"in {self._point}"
        is_only_batch = sum(map(len, self.script.steps)) == 1 and self._point.startswith("step 1, batch")
        return record.place if is_only_batch else f"in {self._point}, {record.place}"

    @property
    def failed_module(self) -> str | None:
        """The name of the module whose forward has failed; None if none has, or if modules are not recorded."""
        record = self.records.get(self._point)
        return record.running[-1] if record is not None and record.running else None

    def _batches(
        self, batches: Mapping[str, Sample], tokens: int
    ) -> Iterator[tuple[str, dict[Key, torch.Tensor]]]:
        """Run all forwards of `batches` and one backward; yield the loss and logits of each batch, by the name of its
        point."""
        logits: dict[str, torch.Tensor] = {}
        losses: dict[str, torch.Tensor] = {}

        def compute_loss(name: str, output: Any) -> torch.Tensor:
            labels = batches[name].labels
            logits[name] = logits_of(output)
            losses[name] = loss_of(logits[name], labels, tokens)
            if (added := added_loss(self._last, output)) is not None:
                self.adds_loss = True
                losses[name] = losses[name] + added * ((labels != IGNORED).sum() / tokens)
            return losses[name]

        if (schedule := self._schedule(next(iter(batches)))) is not None:
            self._run_scheduled(schedule, batches, compute_loss)
        else:
            for name, sample in batches.items():
                if self._draws:  # let the unsplit model and each rank draw the same numbers
                    torch.manual_seed(zlib.crc32(name.encode()))
                with self._recorded(name, len(sample.labels)), self._fusing(name, sample.labels):
                    # The backward is outside of this context, since a recomputed block would be recorded again.
                    output = call(self.model, sample.inputs)
                compute_loss(name, output)
            torch.stack(list(losses.values())).sum().backward()
        for name, sample in batches.items():
            quantities: dict[Key, torch.Tensor] = {("loss", ""): self._summed(losses[name].detach())}
            if isinstance(logits[name], DeferredLogits):
                yield name, quantities
                continue
            detached = logits[name].detach()
            quantities["logits", ""] = detached
            # Only in the first step, since these losses depend on the logits alone.
            compared = self.losses if name.startswith("step 1,") and not self._has_local_tokens else {}
            for loss_name, function in compared.items():
                value, gradient = at_logits(detached, sample.labels, tokens, function)
                quantities |= {
                    (f"{loss_name} loss", ""): value,
                    (f"{loss_name} loss", "its gradient"): gradient,
                }
            yield name, quantities

    def _schedule(self, point: str) -> str | None:
        """Return the schedule with which a pipeline runs the step of `point`; None: it runs as one model, as in step 1."""
        if not isinstance(self.model, PipelinedModel) or self._draws or point.startswith("step 1,"):
            return None
        is_last = point.startswith(f"step {len(self.script.steps)},")
        # With a loss in the head, or with frozen parameters, the backwards of inputs and of weights can't be separate.
        if self.script.freezes or (is_last and self._fused is not None) or not SPLITS_BACKWARD:
            return "Interleaved1F1B" if is_last else "LoopedBFS"
        return "InterleavedZeroBubble"

    def _run_scheduled(
        self, schedule: str, batches: Mapping[str, Sample], compute_loss: Callable[[str, Any], torch.Tensor]
    ) -> None:
        assert isinstance(self.model, PipelinedModel)
        names, stages = list(batches), self.model.stages

        def forward(index: int, stage: Stage, received: Sequence[torch.Tensor]) -> Any:
            name = names[index]
            labels = batches[name].labels
            fusing = nullcontext() if stage.gives else self._fusing(name, labels)
            with fusing, self._recorded(name, len(labels)):
                return stage.run(received, partial(call, stage.model, batches[name].inputs))

        run_in_order(
            stages, schedule, len(names), forward, lambda index, output: compute_loss(names[index], output)
        )

    def _summed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over the context-parallel ranks."""
        border = border_of_model(self.model)
        return loss if border is None else border.tokens.total(loss)

    @property
    def _has_local_tokens(self) -> bool:
        """Whether this CP rank has the logits of its local tokens only. Further losses do not support such logits."""
        border = border_of_model(self.model)
        return border is not None and border.tokens.ranks > 1

    def _fusing(self, name: str, labels: torch.Tensor) -> AbstractContextManager[None]:
        """Return a context in which the head computes the loss in chunks, if `fused` and `name` is in the last step."""
        if self._fused is None or not name.startswith(f"step {len(self.script.steps)},"):
            return nullcontext()
        self._fused.chunk_tokens = max(1, -(labels.numel() // -3))
        return self._fused(labels)

    def _evaluation(self) -> Iterator[tuple[str, dict[Key, torch.Tensor]]]:
        """Yield the logits of forwards without a backward, in evaluation mode."""
        for number, inputs in enumerate(self.script.evaluated, 1):
            name = f"evaluation {number} after step 1"
            yield name, {("logits", ""): logits_of(self._evaluate(name, inputs))}

    def _continuation(self) -> Iterator[tuple[str, dict[Key, torch.Tensor]]]:
        """Yield the logits of a forward that fills a cache, and of a forward that uses the cache, in evaluation mode."""
        # The stages of a pipeline do not support a cache.
        if self.script.cached is not None and not isinstance(self.model, PipelinedModel):
            filled, token = self.script.cached
            name = "the forward that fills a cache"
            output = self._evaluate(name, filled | {"use_cache": True})
            yield name, {("logits", ""): logits_of(output)}
            name = "the forward with a cache"
            continuation = continued(self.model, token, output)
            assert continuation is not None, "a forward returned a cache, and returns none any more"
            yield name, {("logits", ""): logits_of(self._evaluate(name, continuation))}

    def _evaluate(self, name: str, inputs: Mapping[str, Any]) -> Any:
        with self._recorded(name):
            return evaluate(self.model, inputs)

    def _recorded(self, name: str, sequences: int = 1) -> Any:
        self._point = name
        if not self.recording:
            return nullcontext()
        if name not in self.records:  # else an earlier stage has recorded this micro batch
            self.records[name] = Recorder(self.model, sequences=sequences)
        return self.records[name]


def _local(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Return the local tensor of `tensor` in the placements of `like`, without a copy if it has these already."""
    if isinstance(tensor, DTensor) and isinstance(like, DTensor):
        tensor = tensor.redistribute(placements=like.placements)
    return local_of(tensor)


def _settings(dtype: torch.dtype) -> dict[str, Any]:
    """Return AdamW's settings that differ from torch's defaults."""
    # AdamW divides a gradient by its own size plus eps = 1e-8. In float64 this eps is far above rounding. In fewer bits it
    # is below rounding, so a gradient that is only rounding would make a full step. With eps = 1 its step is as small as
    # rounding.
    return {} if dtype == torch.float64 else {"lr": 0.1, "eps": 1.0}


def recompute(decoder: Decoder) -> None:
    """Let the backward recompute each block, with torch's checkpointing."""
    for block in decoder.blocks:
        dtype = next(block.module.parameters()).dtype
        # A float64 model is widened in the recomputation, too.
        block.module.forward = partial(
            checkpoint,
            block.module.forward,
            use_reentrant=False,
            context_fn=partial(lambda again: (nullcontext(), again()), partial(widened, dtype)),
        )
