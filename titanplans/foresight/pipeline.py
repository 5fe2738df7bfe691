"""`RehearsedStage`: a pipeline stage whose neighbours do not exist."""

from typing import Any

from titanplans.errors import ParallelError
from titanplans.parallel.record import record_of
from titanplans.torch_private.pipelining import is_shapes_sent, shapes_of_gradients
from titanplans.training.pipeline.stage import ScheduledStage


class Crossing:
    """The shapes that the first stage sends to the second. Later rehearsals assume that every stage receives the same."""

    shapes: Any = None


class RehearsedStage(ScheduledStage):
    """A torch stage that knows which tensors its neighbours would send. A subclass sets `crossing`.

    torch's stages exchange the shapes of these tensors in the first step, over the process group.
    """

    crossing: Crossing

    def _warmup_forward_vote(
        self, has_backward: bool, received_acc: Any = None
    ) -> Any:  # private: torch PipelineStage
        return received_acc

    def _warmup_backward_result(self, received_result: Any = None) -> Any:  # private: torch PipelineStage
        return _Dynamic()

    def _send_meta(self, meta: Any, dst_stage: int) -> None:  # private: torch PipelineStage
        if is_shapes_sent(meta) and self.is_first:
            self.crossing.shapes = meta

    def _recv_meta(self, src_stage: int) -> Any:  # private: torch PipelineStage
        if src_stage > self.stage_index:
            return shapes_of_gradients(self._stage_meta.outputs)
        shapes = self.crossing.shapes
        stage = record_of(self.language_model.lm).stage
        assert stage is not None
        takes = stage.takes
        if len(shapes.forward_metas) != len(takes):
            raise ParallelError(
                f"stage {self.stage_index} receives {len(takes)} tensors, and the second stage {len(shapes.forward_metas)}: "
                "pipelines in which other tensors cross at each border are not estimated"
            )
        return shapes


class _Dynamic:
    """The result of a vote of all stages: they tell each other the shapes of what they send."""

    def item(self) -> int:
        return 0
