"""torchtitan's `Trainer` with this project's differences; its `Validator` is in `titanplans.training.trainer.validator`.

A resumed run repeats the losses of an undisturbed one to the last bit, so checkpoints hold the random generators. A run
that ends early finishes its writes. When gradients are communicated is decided in `titanplans.parallel`. The loop, the
optimizer step, checkpoints and validation are torchtitan's.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchtitan.trainer
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titanplans.config import rename_option_errors
from titanplans.errors import DataError, Diverged
from titanplans.parallel import DDPConfig, FSDP2Config, ddp
from titanplans.parallel.compile import async_tp
from titanplans.parallel.fsdp import gradient_sync
from titanplans.parallel.mesh.rendezvous import own_rendezvous
from titanplans.parallel.optimizers.load_balance import LoadBalancer
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.pipeline.pipeline import Pipeline
from titanplans.training.trainer.metrics import MetricsProcessor
from titanplans.training.trainer.model import LanguageModel
from titanplans.training.trainer.optimizer import prepare_optimizer
from titanplans.training.trainer.parallelism_report import JobReport
from titanplans.training.trainer.step import (
    Clipping,
    Ending,
    FiniteSoFar,
    WholeSequences,
    clipping,
    get_rng_state,
    set_rng_state,
    whole_batches,
)

_Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class TrainingDone(BaseException):
    """Leaves torchtitan's loop after the last step, before its rank 0 sleeps for 2 seconds."""


class Trainer(torchtitan.trainer.Trainer):
    """`Trainer(config).train()`, then `close()`.

    Attributes:
        ending: under checkpoint.save_on_signal, whether all ranks end after a step.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(torchtitan.trainer.Trainer.Config):
        """torchtitan's, whose `build` makes this class."""

        strategy: FSDP2Config | DDPConfig
        """How the model is parallelised, as given to `model_spec`."""

        skip_nan_inf: bool = False
        """Skip steps whose gradient is not finite."""

        load_balance_coeff: float | None = None
        """By how much a step moves the biases of routers; None: as published."""

        skip_nan_inf_limit: int = 20
        """Steps in a row that may be skipped."""

    # The types that `titanplans.training.trainer.model` and `titanplans.training.trainer.metrics` put into the config.
    model_config: LanguageModel.Config  # pyrefly: ignore[bad-override-mutable-attribute]
    metrics_processor: MetricsProcessor  # pyrefly: ignore[bad-override-mutable-attribute]
    config: Config  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, config: Config):
        self._loaded_rng: dict[str, torch.Tensor] | None = None
        self._batches_done = 0  # of this step
        self._losses: list[torch.Tensor] = []  # likewise
        self._has_trained = False  # a step, in this run
        self.clipping = Clipping(skips=config.skip_nan_inf)
        self.ending: Ending | None = None
        super().__init__(config)
        self.pipeline: Pipeline | None = getattr(self, "pp_schedule", None)
        parts: Any = self.model_parts
        for part in parts:
            part.take_loss(
                self.loss_fn,
                self.parallel_dims.get_optional_mesh("batch"),
                splits_backward=self.pipeline is not None and self.pipeline.splits_backward,
            )
        lms = [part.lm for part in parts]
        stages = None if self.pipeline is None else self.pipeline.group
        self.balancer = LoadBalancer(
            torch.nn.ModuleList(lms), self.parallel_dims, config.load_balance_coeff, stages
        )
        for part in parts:
            part.inferred = self.balancer.loads.forget
        self.finite = FiniteSoFar(self.model_parts, self.device)
        self.checkpointer.finite = self.finite.everywhere  # pyrefly: ignore[missing-attribute]
        self.metrics_processor.total_steps = config.training.steps
        if config.validator.enable:
            self.validator.last_step = config.training.steps  # pyrefly: ignore[missing-attribute]
        self.metrics_processor.of_data = self.dataloader.take_figures  # pyrefly: ignore[missing-attribute]
        self.metrics_processor.balancer = self.balancer
        if config.strategy.float8.recipe_name is not None:
            # torchtitan knows bfloat16's peak, and only some products run in float8.
            self.metrics_processor.peak_flops = None
        with rename_option_errors():
            for optimizer in self.optimizers:
                prepare_optimizer(optimizer, config.strategy.compile)
        self.report = JobReport(
            lms[0],
            self.parallel_dims,
            config.strategy,
            config.dump_folder,
            self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches,
            config.metrics.measure_first_step,  # pyrefly: ignore[missing-attribute]
            self.pipeline
            and self.pipeline.report(self.num_pipeline_parallel_microbatches, config.dump_folder),
        )

    def init_distributed(self) -> ParallelDims:
        """torchtitan's, with a store that ranks of an earlier start have not written to."""
        with own_rendezvous(timedelta(seconds=self.config.comm.init_timeout_seconds)):
            dims = super().init_distributed()
        return WholeSequences.from_config(self.config.parallelism, dims.world_size)

    def should_continue_training(self) -> bool:
        """Return True while steps are left. Under checkpoint.save_on_signal save and end once a rank got a signal.

        Raises:
            TrainingDone: no step is left, or the job ends by a signal; `train` catches it.
        """
        if not super().should_continue_training():
            self._say_what_was_read()
            logger.info("Training completed")
            raise TrainingDone
        if self.ending is not None and self.ending.is_last(self.step):
            self.checkpointer.save_now(self.step)  # pyrefly: ignore[missing-attribute]
            self._say_what_was_read()
            logger.info(
                f"SIGTERM: the job ends after step {self.step}, which is saved; the same command resumes"
            )
            raise TrainingDone
        return True

    def train(self) -> None:
        """Run the steps that are left, from the newest checkpoint if there is one.

        With `checkpoint.create_seed_checkpoint` save the initial weights as step 0 instead.
        """
        if self.config.checkpoint.create_seed_checkpoint:
            self.checkpointer.save(curr_step=0, last_step=True)
        else:
            self.report.start()
            with contextlib.suppress(TrainingDone):
                super().train()
            torch.distributed.barrier()  # all end together: rank 0 may host the store

    def batch_generator(self, data_iterable: Iterable[_Batch]) -> Iterator[_Batch]:
        """torchtitan's, which on a resumed run starts with the random generators of the checkpoint.

        They are set after the first batch because making a data iterator draws a seed from them,
        once per run: an undisturbed run has done so long before this step.
        """
        batches = super().batch_generator(data_iterable)
        batch = next(batches)
        if self._loaded_rng is not None:
            set_rng_state(self._loaded_rng)
            self._loaded_rng = None
        yield batch
        yield from batches

    def train_step(self, data_iterator: Iterator[_Batch]) -> None:
        """torchtitan's step, with this project's clipping and skipping of gradients that are not finite; then validation.

        Validation that is due comes before the step is saved: a run that is killed between the two repeats both.

        Raises:
            DataError: the data can't be read further; the last whole step is saved.
            Diverged: the loss of a logged step is not finite, or its gradient's norm.
            ConfigError: in this run's first step async tensor parallelism fused nothing, or a block that was to be
                compiled ran eagerly.
        """
        self.step -= 1  # the last complete step
        try:
            with self._saved_before_a_data_error():
                number = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
                batches = [next(data_iterator) for _ in range(number)]
        except DataloaderExhaustedError:
            logger.info(
                f"the data were read to their end, after step {self.step} of at most {self.config.training.steps}"
            )
            if self._has_trained:
                self._validate_last_step()
                self._say_what_was_read()
                self.checkpointer.save(self.step, last_step=True)
            raise TrainingDone from None
        self.step += 1
        if self.report.steps_to_measure:
            with self.report.measuring(self.step, self.lr_schedulers):
                self._train_step(iter(batches))
        else:
            self._train_step(iter(batches))
        strategy = self.config.strategy
        if not self._has_trained and getattr(strategy, "enable_async_tensor_parallel", False):
            with rename_option_errors():
                async_tp.check_fused(self.parallel_dims, strategy.async_tensor_parallel_unfused)  # pyrefly: ignore[missing-attribute]
        self._has_trained = True
        self._validate_if_due()

    def _validate_last_step(self) -> None:
        """Validate the step after which the data have ended."""
        if self.config.validator.enable:
            self.validator.last_step = self.step  # pyrefly: ignore[missing-attribute]
            self._validate_if_due()

    def _validate_if_due(self) -> None:
        if self.config.validator.enable and self.validator.should_validate(self.step):
            with self._saved_before_a_data_error():
                self.validator.validate(self.model_parts, self.step)

    def evaluate(self, checkpoint: Path, sources: Mapping[str, TextDataLoader.Config]) -> dict[str, float]:
        """Return the validation loss of the weights of a checkpoint, in nats per token, by the names of `sources`."""
        self.step = self.checkpointer.load_weights(checkpoint)  # pyrefly: ignore[missing-attribute]
        validator: Any = self.validator
        return {name: validator.loss_of(data, self.model_parts, self.step) for name, data in sources.items()}

    @contextlib.contextmanager
    def _saved_before_a_data_error(self) -> Iterator[None]:
        """Save the last step before a DataError of the body, raised on all ranks, ends the run."""
        try:
            yield
        except DataError as error:
            if not self._has_trained:
                raise
            self.checkpointer.save_now(self.step)  # pyrefly: ignore[missing-attribute]
            raise DataError(f"after step {self.step}: {error}; {self.resume_point()}") from error

    def _say_what_was_read(self) -> None:
        for name, (_, how_much) in self.dataloader.read().items():  # pyrefly: ignore[missing-attribute]
            logger.info(f"data read of {name}: {how_much}")

    def _train_step(self, data_iterator: Iterator[_Batch]) -> None:
        self._batches_done, self._losses = 0, []
        norms = []

        def clip(parameters: list[torch.Tensor], most: float) -> torch.Tensor:
            stages: dict[str, Any] = {}
            if (pipeline := self.pipeline) is not None:
                pipeline.share_gradients()
                stages = {"pp_group": pipeline.group, "counted": pipeline.counted(parameters)}
            norms.append(self.clipping.clip(parameters, most, self.step, **stages))
            self.balancer.after_backward(skipped=bool(self.clipping.in_a_row))  # before the step is logged
            if self.clipping.in_a_row >= self.config.skip_nan_inf_limit:
                raise Diverged(
                    f"step {self.step}: the gradient was not finite in {self.clipping.in_a_row} steps in a row "
                    f"(training.skip_nan_inf_limit), so training can't recover; {self.resume_point()}. Resume with a lower "
                    "optimizer.lr, or exclude the data of those steps"
                )
            return norms[-1]

        try:
            with clipping(clip), whole_batches(self.parallel_dims):
                super().train_step(data_iterator)
        except RuntimeError as error:
            # torchtitan's train_step itself raises for a loss that is not finite, once the step is over.
            if not _raised_in(error, torchtitan.trainer.Trainer.train_step):
                raise
            if not self.clipping.in_a_row:  # else the step was skipped
                raise self._diverged("loss") from error
        # After the last step no loss would show it. A step that is not logged does not synchronise.
        logged = self.metrics_processor.should_log(self.step)
        if logged and not self.config.skip_nan_inf and not all(norm.isfinite() for norm in norms):
            raise self._diverged("gradient's norm")
        if not self.clipping.in_a_row:
            self.finite.take((*norms, *self._losses))

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"step {self.step}: the {what} is not finite, so the weights are lost; {self.resume_point()}. Start the job "
            "again with a lower optimizer.lr or more lr_scheduler.warmup_steps"
        )

    def resume_point(self) -> str:
        """Return from where the job can resume, in words, once pending writes are done."""
        if not self.config.checkpoint.enable:
            return "nothing was saved (checkpoint.enable = false)"
        return self.checkpointer.resume_point()  # pyrefly: ignore[missing-attribute]

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """torchtitan's, with gradients summed over ranks when the strategy says so."""
        self._batches_done += 1
        with self._accumulating(last=self._batches_done == self.gradient_accumulation_steps):
            loss = super().forward_backward_step(**batch)
        self._losses.append(loss.detach())
        return loss

    def post_dataloading_process(self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor) -> Any:
        """torchtitan's, which also gives the model the labels of its next forward."""
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, extra | {"labels": labels}

    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        lm: Any = self.model_parts[0].lm
        strategy = self.config.strategy
        if self.pipeline is not None:  # torch's stages see to it
            return contextlib.nullcontext()
        if isinstance(strategy, DDPConfig):
            return ddp.accumulate(lm, last=last, defer=strategy.defer_grad_sync)
        return gradient_sync.accumulate(
            lm, last=last, defer=strategy.fsdp_defer_grad_sync, keep_gathered=strategy.fsdp_keep_gathered
        )

    def state_dict(self) -> dict[str, Any]:
        """Step, tokens seen, and the random generators.

        One copy of these is kept: torchtitan gives every rank the same seed, and ranks draw alike.
        """
        return super().state_dict() | {"rng": get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the random generators wait for the first batch."""
        super().load_state_dict(state_dict)
        self._loaded_rng = state_dict["rng"]

    def close(self) -> None:
        """Finish pending writes (checkpoint, metrics) and leave the process group."""
        self.checkpointer.maybe_wait_for_saving()
        super().close()
        torch.distributed.destroy_process_group()


def _raised_in(error: RuntimeError, function: Callable[..., Any]) -> bool:
    """Whether a `raise` of this very function made the error, and nothing that it calls."""
    *_, (innermost, _line) = traceback.walk_tb(error.__traceback__)
    return type(error) is RuntimeError and innermost.f_code is function.__code__
