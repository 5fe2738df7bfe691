"""A stage as torch's schedules call it."""

from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from titanplans.torch_private.pipelining import backward_of_weights, without_views
from titanplans.training.trainer.loss import CrossEntropyLoss


class ScheduledStage(PipelineStage):
    """The stage `part`, a `LanguageModel`. Every stage is given the tokens of a micro batch, by keyword.

    The last one gives the loss, and not logits, which torch would keep: it is of one number, where logits are sharded.

    Attributes:
        valid_tokens: of the whole batch; None, in validation, for a sum over tokens.
    """

    valid_tokens: torch.Tensor | None = None

    def __init__(
        self,
        part: Any,
        number: int,
        stages: int,
        device: torch.device,
        group: torch.distributed.ProcessGroup,
        loss: CrossEntropyLoss,
    ):
        # FSDP2's state is the model's.
        super().__init__(part.lm, number, stages, device, group=group)
        self.part, self.loss = part, loss

    def forward_maybe_with_nosync(
        self, *received: torch.Tensor, tokens: torch.Tensor, labels: torch.Tensor, **inputs: Any
    ) -> Any:
        """Run a micro batch; `received` is what the stage before gave."""
        output = self.part(tokens, labels=labels, received=received, **inputs)
        if self.is_last:
            return self.loss(output, labels, self.valid_tokens)[0]
        return without_views(output)

    def _compute_outputs(
        self, *received: Any, module: Any, **inputs: Any
    ) -> Any:  # private: torch PipelineStage
        return self.forward_maybe_with_nosync(*received, **inputs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False
    ) -> Any:
        """torch's, which frees what several weights share with the first of them."""
        if backward_type != "weight":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        backward_of_weights(self.submod.parameters(), bwd_kwargs["param_groups"])
        return (), None

    def _post_metadata_inference_cleanup(self) -> None:  # private: torch PipelineStage
        super()._post_metadata_inference_cleanup()
        self.part.inferred()
