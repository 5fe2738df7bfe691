"""Train a split model in Hugging Face's Trainer, and in trainers built on it, such as TRL's SFTTrainer.

class MyTrainer(SplitTrainer, Trainer): ...

model = split_model(model, Degrees(tp=2))
MyTrainer(model, arguments, train_dataset=data).train()
"""

import math
import os
import shutil
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, ParallelismConfig, PartialState
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, Trainer
from transformers.distributed import DistributedConfig

from titanplans.adapters.low_rank import adapted
from titanplans.errors import ParallelError
from titanplans.integrations.checkpoint import load_checkpoint, save_checkpoint
from titanplans.parallel import Degrees, FSDP2Config, ParallelManager
from titanplans.split.gradients import clip_gradients, total_norm
from titanplans.weights.adapters import load_adapter, options_of_peft, save_adapter
from titanplans.weights.load import load_weights
from titanplans.weights.save import save_weights

_OPTIMIZER = "optimizer"
"""A checkpoint's subfolder with the optimizer's state, in torch's distributed format."""
_SCHEDULER = "scheduler.pt"


def split_model(
    model: PreTrainedModel, degrees: Degrees, config: FSDP2Config | None = None, *, lora: Any = None
) -> PreTrainedModel:
    """Split `model` in place for a Trainer: tensor, expert and data parallelism. Call this before the Trainer is created.

    Autocast, recomputation and accumulation are set by the Trainer's arguments. The ranks of one tensor-parallel group read
    the same batches, and gradients are averaged over the data-parallel ranks, as the Trainer's loss expects.

    Args:
        model: a causal language model with the same values on every rank. A model on meta is allocated, and its weights have
            to be loaded next, with `load_weights(model, folder)`.
        degrees: `tp`, `ep`, `dp_replicate` and `dp_shard` are used.
        config: the strategy; None: FSDP2 without mixed precision, with gathered logits. The logits have to be gathered,
            because the Trainer's losses and metrics read plain tensors.
        lora: a LoraConfig of peft. The adapters are titanplans', but they are saved and loaded as peft's files.

    Raises:
        PlanError: the plan does not fit the model or the degree.
        ParallelError: a degree of context or pipeline parallelism is above 1, or an option can't be honoured.
        ModelError: `lora` describes adapters that compute differently from plain LoRA.
    """
    if degrees.cp != 1 or degrees.pp != 1:
        raise ParallelError(
            f"degrees = {degrees}: the Trainer computes the loss of full sequences on each rank; set cp and pp to 1"
        )
    config = FSDP2Config(disable_loss_parallel=True) if config is None else config
    if not config.disable_loss_parallel:
        raise config.error("disable_loss_parallel", "the Trainer's losses need plain logits; set it to true")
    if lora is not None:
        config = config.replace(lora=_lora_options(lora))
    # Create the process group as the Trainer's arguments do. If they have created it already, this does nothing.
    PartialState(cpu=not torch.accelerator.is_available())
    if not torch.distributed.is_initialized():
        raise ParallelError(
            f"split_model with {degrees}: this process is not a rank of a process group; start it with torchrun "
            "--nproc-per-node N, or with accelerate launch"
        )
    manager = ParallelManager(config, degrees)
    is_on_meta = any(parameter.is_meta for parameter in model.parameters())
    manager.parallelize(model if is_on_meta else nn.Module.to(model, manager.device))
    if is_on_meta:
        manager.to_empty()
    mesh = manager.mesh
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are averaged over these ranks. A ParallelManager sums them, since its loss is divided by the tokens
            # of all ranks.
            module.set_gradient_divide_factor(float(mesh.dp_replicate * mesh.dp_shard))
    # A Trainer computes from these values how many ranks read the same batch.
    model._tp_size = mesh.tp
    model.config.distributed_config = DistributedConfig(
        tp_size=mesh.tp, fsdp_size=mesh.dp_shard, dp_replicate_size=mesh.dp_replicate
    )
    return model


def _lora_options(lora: Any) -> Any:
    values = lora.to_dict()
    if values.get("target_modules") is None or values.get("init_lora_weights") is not True:
        raise ParallelError(
            f"lora: target_modules = {values.get('target_modules')!r}, init_lora_weights = "
            f"{values.get('init_lora_weights')!r}: name the modules, and leave init_lora_weights at True"
        )
    return options_of_peft(values, "lora")


def parallelism_config(model: PreTrainedModel) -> ParallelismConfig:
    """Return accelerate's description of a model that `split_model` has split: `Accelerator(parallelism_config=...)`.

    With it, accelerate's loaders give the ranks of a tensor-parallel group the same batches, and accelerate does not wrap
    the model.
    """
    sizes: Any = model.config.distributed_config
    return _Parallelism(tp_size=sizes.tp_size, dp_shard_size=sizes.dp_size)


class _Parallelism(ParallelismConfig):
    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        # accelerate refuses this config on CPUs, although split models train there as on GPUs.
        if accelerator.distributed_type != DistributedType.MULTI_CPU:
            super()._validate_accelerator(accelerator)


class SplitTrainer:
    """Mixin for a Trainer that handles the loss, gradients, weights and checkpoints of a split model.

    It has to be the first base class.

    A checkpoint has the weights as a Hugging Face folder (with LoRA, peft's files) and the optimizer's state in torch's
    distributed format. Training can be resumed from it at the same and at other degrees.
    """

    # The Trainer has no public methods for moving the model, accelerate's arguments, clipping, saving and loading. So this
    # class overrides private ones of transformers 5.23 and 5.24.

    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    data_collator: Any
    processing_class: Any
    state: Any
    is_fsdp_enabled: bool
    is_deepspeed_enabled: bool

    def __init__(self, model: PreTrainedModel, *args: Any, peft_config: Any = None, **kwargs: Any):
        if peft_config is not None:
            raise ParallelError(
                "peft_config: peft's layers would wrap split Linears, and they do not know shards; pass it as "
                "split_model(..., lora=...)"
            )
        if getattr(getattr(model, "config", None), "distributed_config", None) is None:
            raise ParallelError(
                f"{type(model).__name__} is not split: call titanplans.integrations.transformers.split_model first"
            )
        loss = super().compute_loss.__func__  # type: ignore[misc]
        self._is_sft = loss.__module__ == "trl.trainer.sft_trainer"
        if loss.__module__.startswith("trl.") and not self._is_sft:
            raise ParallelError(
                f"{type(self).__name__}: its loss multiplies hidden states by the head's full weight, but a rank has only a "
                "shard of it; of TRL's trainers, SFTTrainer works"
            )
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]
        # This tells the Trainer not to wrap the model, since a split model reduces its gradients itself. It is set after the
        # constructor has run, because the constructor refuses to save the optimizer of a model that transformers has split.
        self.is_distributed_loading_by_transformers = True
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ParallelError(
                "the Trainer's own FSDP or DeepSpeed would wrap a split model; leave out fsdp, deepspeed and the configs of "
                "accelerate launch, since split_model(model, degrees) shards with FSDP2"
            )
        if self._is_sft and self.args.loss_type != "nll":
            raise ParallelError(
                f"loss_type = {self.args.loss_type!r}: SFTTrainer trains a split model with 'nll'"
            )
        if hasattr(collator := self.data_collator, "pad_to_multiple_of"):
            # The sequence is sharded over the tensor-parallel ranks, so its length has to be a multiple of their number.
            # With a collator that does not pad, the user has to take care of this.
            multiple = math.lcm(collator.pad_to_multiple_of or 1, self.model.tp_size)
            collator.pad_to_multiple_of = multiple if multiple > 1 else None

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `split_model` has moved the model, and FSDP2 refuses to move its parameters."""

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        if "parallelism_config" in args:
            args["parallelism_config"] = parallelism_config(self.model)
        return args

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Compute the Trainer's loss, also for SFTTrainer, whose own loss would need the full head on every rank.

        The entropy and the accuracy that SFTTrainer computes with its loss are not logged.
        """
        if self._is_sft:
            return Trainer.compute_loss(self, model, inputs, *args, **kwargs)  # type: ignore[arg-type]
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return clip_gradients(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> torch.Tensor:
        # Called even if clipping is off: it also sums the gradients that are still partial over the tensor-parallel ranks.
        return total_norm(model.parameters()) if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = self.args.output_dir if output_dir is None else output_dir
        if adapted(self.model):
            save_adapter(self.model, folder)
        else:
            written = os.path.join(folder, "being-saved")  # `save_weights` needs an empty folder
            save_weights(self.model, written)
            if self.args.should_save:
                for name in os.listdir(written):
                    shutil.move(os.path.join(written, name), os.path.join(folder, name))
                os.rmdir(written)
        if self.args.should_save:
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load = load_adapter if adapted(self.model) else load_weights
        load(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer.optimizer  # torch's optimizer, in accelerate's wrapper
        save_checkpoint(os.path.join(output_dir, _OPTIMIZER), self.model, optimizer, weights=False)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        optimizer = self.optimizer.optimizer
        load_checkpoint(os.path.join(checkpoint, _OPTIMIZER), self.model, optimizer, weights=False)
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))
