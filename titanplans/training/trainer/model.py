"""A Hugging Face style causal language model as torchtitan's trainer wants to see it.

`LanguageModel` adapts the calling convention (tokens in, logits out; weights initialised on request). Parameter names,
state dicts and parallelisms are the wrapped model's. Models are built in `titanplans.modeling` and parallelised in
`titanplans.parallel`.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from transformers import PretrainedConfig, PreTrainedModel

from titanplans import modeling
from titanplans.apply.prepare import prepare
from titanplans.config import DDPConfig, FSDP2Config, LoRA, rename_option_errors
from titanplans.config.sections.parallelism import PipelineParallel
from titanplans.errors import ModelError
from titanplans.loss import DeferredLogits, FusedLoss, NotFused, Objective, added_loss
from titanplans.parallel import parallelize
from titanplans.parallel.parallelize import apply_data_parallelism
from titanplans.parallel.record import record_of
from titanplans.split.collectives import Group, group_of
from titanplans.split.stages.trace import logits_of, without_cache
from titanplans.training.pipeline.pipeline import Pipeline, build_pipeline
from titanplans.training.trainer import documents
from titanplans.training.trainer.loss import CrossEntropyLoss


class LanguageModel(BaseModel):
    """A causal language model under torchtitan's `BaseModel` protocol.

    The wrapper *is* the wrapped model as far as PyTorch can tell: it uses the model's own tables of
    parameters, buffers and children, so names carry no prefix, and a checkpoint written through the
    wrapper is a checkpoint of the model. What goes beyond the tables (FSDP's hooks on the root,
    `to_empty`, state dicts) is passed on to the model.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """The model, as torchtitan's trainer carries it."""

        hf_config: PretrainedConfig
        """The architecture. `modeling.load_config` and `modeling.load_config_file` make one."""

        documents: str | None = None
        """The keyword by which the model keeps the documents of a sequence apart; None: it runs across their borders."""

        lora: LoRA = LoRA()  # noqa: RUF009  frozen
        """Its adapters."""

        freeze: tuple[str, ...] = ()
        """What of it does not train."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Nothing to take over: the architecture does not depend on the job."""

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and floating-point operations per token of one forward and backward."""
            assert isinstance(model, LanguageModel)
            lm = model.lm
            if self.lora.rank is not None or self.freeze:
                lm = copy.deepcopy(lm)  # on meta
            with rename_option_errors():
                prepare(lm, lora=self.lora.replace(quantize_base=None), freezes=self.freeze)
            return modeling.count_flops(lm, seq_len)

    lm: PreTrainedModel
    added: torch.Tensor | None = None
    """The router balance loss of the newest forward."""
    loss: CrossEntropyLoss
    """The job's, with the terms that are added in training to the cross entropy of a token."""
    fused: FusedLoss | None = None
    """What computes the loss in the head, chunk by chunk; None: the forward gives logits."""
    pipeline: dist.ProcessGroup | None = None
    """The ranks that have the other stages, where this is one; None: it is whole."""
    data: Group | None = None
    """The ranks of data parallelism; None: there is one."""
    inferred: Callable[[], None] = staticmethod(lambda: None)
    """Called after a forward in which a pipeline's stage has learnt the shapes that it receives, and nothing else."""
    finish: Callable[[], None] | None = None
    """Called once the weights have values: applies DDP."""

    def __init__(self, config: Config):
        super().__init__()
        lm = modeling.build(config.hf_config)
        # Not an attribute in PyTorch's sense: registered as a child, `lm` would prefix every name.
        self.__dict__["lm"] = lm
        self._documents, self._without_cache = config.documents, without_cache(lm)
        for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
            self.__dict__[table] = lm.__dict__[table]

    def take_loss(
        self, loss: CrossEntropyLoss, batch: DeviceMesh | None, *, splits_backward: bool = False
    ) -> None:
        """Compute `loss` in the head where that can be, and add the router balance loss of the ranks of `batch`.

        `splits_backward`: a schedule computes gradients of weights after those of inputs, and runs a loss's backward twice.

        Raises:
            NotFused: the job asks for a loss in the head, and it can't be computed there.
        """
        stage = record_of(self.lm).stage
        if stage is not None and stage.gives:
            return  # it makes no logits
        self.loss, self.fused = loss, loss.fuse(self.lm, splits_backward=splits_backward)
        self.data = None if batch is None else group_of(batch)
        loss.added = lambda: self.added

    def forward(
        self,
        tokens_BL: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        received: Sequence[torch.Tensor] = (),
    ) -> Any:
        """Logits `[B, L, V]` of token ids `[B, L]`; under loss parallel a DTensor, `Shard(2)` on "tp".

        `positions`, which count from the beginning of each document packed into a sequence, are dropped unless the model is
        to keep the documents apart: else attention and recurrent states run across their borders, and a token's position
        is its place in the sequence. By `cu_seqlens` the logits are `[1, B * L, V]`, in the same order.

        Where the loss is fused and the labels are known, what stands in for the logits, which nothing but the loss reads.

        A stage of a pipeline takes what it has `received`, too; before the last one it returns what the next one takes.
        """
        inputs: dict[str, Any] = {"input_ids": tokens_BL}
        if self._documents is not None:
            assert positions is not None
            inputs = documents.inputs(tokens_BL, positions, self._documents)
        inputs |= self._without_cache
        stage = record_of(self.lm).stage
        forward = partial(self._output, inputs, labels)
        output = forward() if stage is None else stage.run(received, forward)
        if stage is not None and stage.gives:
            return output
        self.added = added_loss(self.lm, output, self.data if self.training else None)
        if self.added is None and getattr(self.lm.config, "output_router_logits", False):
            raise ModelError(
                f"output_router_logits = True, but {type(self.lm).__name__} computes no router balance loss; "
                "remove output_router_logits"
            )
        return logits_of(output)

    def _output(self, inputs: dict[str, Any], labels: torch.Tensor | None) -> Any:
        output = None if self.fused is None or labels is None else self._fused(inputs, labels)
        return self.lm(**inputs) if output is None else output

    def _fused(self, inputs: dict[str, Any], labels: torch.Tensor) -> Any:
        """Return the output of a forward whose head computes the loss; None if the model won't have it, now and later."""
        assert self.fused is not None
        objective = self.loss.objective if self.training else Objective()
        try:
            with self.fused(labels, **objective._asdict()):
                output = self.lm(**inputs)
            if not isinstance(logits := logits_of(output), DeferredLogits):
                raise NotFused(f"{type(self.lm).__name__} returns other logits than its head")
            logits.check()
        except NotFused as error:
            self.loss.on_fusion_failed(error)
            self.fused = None
            return None
        return output

    @torch.no_grad()
    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Initialise every parameter and buffer, after `to_empty`.

        The weights depend on torch's seed alone, which torchtitan makes equal on all ranks: not on
        the degrees, nor on how often the generator was used since. Then DDP, which needs values, is applied.

        Args:
            buffer_device: the device of the buffers if not that of the parameters (CPU offload).
        """
        modeling.initialize(self.lm, seed=torch.initial_seed())
        if buffer_device is not None:
            for module in self.lm.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(buffer_device)
        if self.finish is not None:
            with rename_option_errors():
                self.finish()

    def verify_module_protocol(self) -> None:
        """Accept third-party modules: `titanplans.modeling` initialises them, not torchtitan's protocol."""

    def train(self, mode: bool = True) -> "LanguageModel":
        """Set training mode on the wrapped model, whose own flag its forward reads."""
        self.lm.train(mode)
        self.training = mode
        return self

    def _apply(self, fn: Callable, recurse: bool = True) -> "LanguageModel":
        self.lm._apply(fn, recurse)  # FSDP's root re-reads its shards after to_empty
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The wrapped model's state dict, by way of its hooks (FSDP reshards its root in one)."""
        return self.lm.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the wrapped model, by way of its hooks."""
        return self.lm.load_state_dict(*args, **kwargs)


def model_spec(
    config: PretrainedConfig,
    *,
    name: str,
    flavor: str,
    strategy: FSDP2Config | DDPConfig,
    pipeline: PipelineParallel = PipelineParallel(),  # noqa: B008  frozen
    documents: str | None = None,
) -> ModelSpec:
    """Return the model spec for torchtitan's trainer.

    The `strategy` says how the model is parallelised: torchtitan's own configs, which the trainer passes too, are not read.
    `name` and `flavor` are for the log; `documents` is as in `LanguageModel.Config`.
    """

    def parallelize_language_model(
        model: LanguageModel, *, parallel_dims: Any, dump_folder: str, **_: Any
    ) -> LanguageModel:
        with rename_option_errors():
            parallelize(model.lm, parallel_dims=parallel_dims, config=strategy, dump_folder=dump_folder)
        if (check := record_of(model.lm).image_check) is not None:
            check.remove()  # a job's batches are text
        if isinstance(strategy, DDPConfig):
            # DDP sends rank 0's values, and the trainer gives a model its values after this.
            model.finish = partial(apply_data_parallelism, model.lm, parallel_dims, strategy)
        return model

    def pipeline_language_model(
        model: LanguageModel,
        *,
        parallel_dims: Any,
        training: Any,
        device: Any,
        loss_fn: Any,
        dump_folder: str,
        **_: Any,
    ) -> tuple[Pipeline, list[LanguageModel], bool, bool]:
        assert isinstance(strategy, FSDP2Config)  # DDP has been refused
        with rename_option_errors():
            made = build_pipeline(
                model,
                pipeline,
                strategy,
                parallel_dims=parallel_dims,
                seq_len=training.seq_len,
                device=device,
                loss=loss_fn,
                dump_folder=dump_folder,
            )
        # Each process is given the tokens, and the loss.
        return made, made.parts, True, True

    return ModelSpec(
        name=name,
        flavor=flavor,
        model=LanguageModel.Config(
            hf_config=config, documents=documents, lora=strategy.lora, freeze=strategy.freeze
        ),
        parallelize_fn=parallelize_language_model,
        pipelining_fn=pipeline_language_model,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
