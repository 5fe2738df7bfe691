"""torchtitan's `Validator` with this project's differences."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torchtitan.components.validate

from titanplans.parallel.fsdp import gradient_sync
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.trainer.metrics import MetricsProcessor


class Validator(torchtitan.components.validate.Validator):
    """torchtitan's, in sizes of its own, which counts neither into the time nor into the tokens of training."""

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.components.validate.Validator.Config):
        """torchtitan's, with the sizes of [validation], under names that `build` does not hand over itself."""

        own_batch_size: int
        """Sequences at a time on one data-parallel rank."""

        own_seq_len: int
        """Tokens in a sequence."""

        unshard: bool = False
        """Gather the weights, sharded by FSDP2, once for all batches."""

    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]
    metrics_processor: MetricsProcessor  # pyrefly: ignore[bad-override-mutable-attribute]

    last_step: int | None = None
    """Of the job, which is validated too; the trainer sets it."""

    def __init__(self, config: Config, **kwargs: Any):
        kwargs |= {"local_batch_size": config.own_batch_size, "seq_len": config.own_seq_len}
        super().__init__(config, **kwargs)
        self._validated = 0  # the last step that was

    def should_validate(self, step: int) -> bool:
        """Whether it is due at `step`, and not done: torchtitan's loop asks again once the step is saved."""
        return step != self._validated and (step == self.last_step or super().should_validate(step))

    def validate(self, model_parts: list[torch.nn.Module], step: int) -> None:
        """Log the loss over `steps` batches of the validation data, in nats per token."""
        with ExitStack() as stack:
            stack.enter_context(self.metrics_processor.paused())
            parts: list[Any] = model_parts if self.config.unshard else []
            for part in parts:
                stack.enter_context(gradient_sync.unsharded(part.lm))
            super().validate(model_parts, step)
        self._validated = step

    def loss_of(
        self, dataloader: TextDataLoader.Config, model_parts: list[torch.nn.Module], step: int
    ) -> float:
        """Return the validation loss of other data, in nats per token, which is logged, too."""
        self.dl_config = replace(dataloader, infinite=self.config.steps != -1)
        self.validate(model_parts, step)
        return self.metrics_processor.validation_loss

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, model_parts: list[torch.nn.Module]
    ) -> Any:
        """torchtitan's, which also tells the model the labels of the forward that comes."""
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels, model_parts)
        return inputs, labels, extra | {"labels": labels}
