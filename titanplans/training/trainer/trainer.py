"""A training job: `Trainer(job)` makes its parts, `train()` takes its steps. Read it from the top.

Parts come from torchtitan where they serve as they are: the containers of optimizers and schedules, the sinks of metrics,
the profiler, garbage collection, sums over ranks. The forward of a model is in `model.py`, a pipeline's in
`pipeline/`, its parallelisation in `titanplans.parallel`.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.distributed.utils import dist_max, dist_sum, dist_sum_tensor, set_determinism
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.tools.profiler import Profiler

from titanplans.config import DDPConfig, JobConfig, rename_option_errors, strategy_of
from titanplans.disk import write_whole
from titanplans.errors import DataError, Diverged
from titanplans.loss import IGNORED
from titanplans.parallel import ddp
from titanplans.parallel.compile import async_tp
from titanplans.parallel.fsdp import gradient_sync
from titanplans.parallel.mesh.process_group import local_device
from titanplans.parallel.optimizers.load_balance import LoadBalancer
from titanplans.training.checkpoint.manager import CheckpointManager
from titanplans.training.checkpoint.match import job_values
from titanplans.training.data.loader import TextDataLoader
from titanplans.training.data.text_tokenizer import TextTokenizer
from titanplans.training.job import parts, resolve
from titanplans.training.launch.processes import lower_timeouts, start_processes
from titanplans.training.trainer import documents
from titanplans.training.trainer.loss import CrossEntropyLoss
from titanplans.training.trainer.metrics import MetricsProcessor
from titanplans.training.trainer.model import make_models
from titanplans.training.trainer.optimizer import LRSchedulers, Optimizers, prepare_optimizer
from titanplans.training.trainer.parallelism_report import JobReport
from titanplans.training.trainer.step import Clipping, Ending, FiniteSoFar, get_rng_state, set_rng_state

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]
"""Inputs ("input", "positions") and labels, each `[local_batch_size, seq_len]`."""


class Trainer:
    """The parts of a job that `titanplans.training.job.checks` has checked, on this rank; `train()`, then `close()`.

    Attributes:
        step: how many were taken, the running one included.
        tokens_seen: on this rank, by all steps.
        ending: under checkpoint.save_on_signal, whether all ranks end after a step.

    Raises:
        ConfigError, ModelError, ParallelError, DataError: a part can't be made as the job says.
    """

    def __init__(self, job: JobConfig):
        self.job, self.strategy = job, strategy_of(job)
        self.hf_config = resolve.hf_config(job)
        self.device = local_device()
        self.mesh = start_processes(job, self.device)
        self.batch_mesh = self.mesh.get_optional_mesh("batch")
        self.loss_mesh = self.mesh.get_optional_mesh("loss")
        self.cp_mesh = self.mesh.get_optional_mesh("cp")
        self.step = self.tokens_seen = self._validated = 0
        self.ending: Ending | None = None
        self.gc = utils.GarbageCollection(job.training.gc_freq, job.training.gc_debug)
        # No distinct seeds: the stages of a pipeline draw the weights that the unsplit model has.
        set_determinism(self.mesh, self.device, job.debug, distinct_seed_mesh_dims=[])  # pyrefly: ignore[bad-argument-type]
        values = job_values(job)
        self._show_job(values)
        self.metrics_processor = MetricsProcessor(
            job.metrics, self.mesh, self.device, dump_folder=job.job.dump_folder, values=values
        )
        self._make_model()
        self._make_optimizers()
        self._make_data()
        self.clipping = Clipping(skips=job.training.skip_nan_inf)
        self.finite = FiniteSoFar(self._lms, self.device)
        states = {
            "optimizer": self.optimizers,
            "lr_scheduler": self.lr_schedulers,
            "dataloader": self.dataloader,
            "train_state": self,
        }
        self.checkpointer = CheckpointManager(
            job,
            self._lms,
            states,
            hf_config=self.hf_config,
            is_finite=self.finite.everywhere,
            pipeline=self._pipeline_group,
        )
        self._loaded_rng: dict[str, torch.Tensor] | None = None
        pipeline_report = None
        if self.pipeline is not None:
            pipeline_report = self.pipeline.report(self.microbatches, job.job.dump_folder)
        self.report = JobReport(
            self._lms[0],
            self.mesh,
            self.strategy,
            job.job.dump_folder,
            self.accumulation_steps * self.microbatches,
            job.metrics.measure_first_step,
            pipeline_report,
        )

    # Making the parts.

    def _make_model(self) -> None:
        """Make the model, or this rank's stages of it, parallelised and with initial weights."""
        job, mesh = self.job, self.mesh
        self.loss = CrossEntropyLoss(job.loss, self.strategy.compile)
        self.model_parts, self.pipeline, flops = make_models(
            job, self.strategy, self.hf_config, mesh, self.device, self.loss
        )
        self._pipeline_group = None if self.pipeline is None else self.pipeline.group
        lms = torch.nn.ModuleList(self._lms)
        self.balancer = LoadBalancer(lms, mesh, job.optimizer.load_balance_coeff, self._pipeline_group)
        for model in self.model_parts:
            model.inferred = self.balancer.loads.discard
        metrics = self.metrics_processor
        metrics.num_flops_per_token, metrics.balancer = flops, self.balancer
        metrics.total_steps = job.training.steps
        if self.strategy.float8.recipe_name is not None:
            metrics.peak_flops = None  # the known peak is bfloat16's, and only some products run in float8
        metrics.log_model()

    @property
    def _lms(self) -> list[Any]:
        """The model, or this rank's stages of it."""
        return [model.lm for model in self.model_parts]

    def _make_optimizers(self) -> None:
        job = self.job
        self.optimizers = Optimizers(job, self._lms)
        self.lr_schedulers = LRSchedulers(job, self.optimizers)
        with rename_option_errors():
            for optimizer in self.optimizers:
                prepare_optimizer(optimizer, self.strategy.compile)

    def _make_data(self) -> None:
        job, batch = self.job, self.batch_mesh
        ranks, rank = (1, 0) if batch is None else (batch.size(), batch.get_local_rank())
        each = job.training.local_batch_size
        in_step = resolve.global_batch_size(job, ranks)
        self.accumulation_steps = in_step // (each * ranks)
        size = job.parallelism.pipeline_parallel_microbatch_size
        self.microbatches = 1 if self.pipeline is None else each // size
        self._for_loaders = {
            "dp_world_size": ranks,
            "dp_rank": rank,
            "tokenizer": TextTokenizer.Config().build(tokenizer_path=resolve.tokenizer_path(job)),
        }
        self._apart = documents.are_apart(job, self.model_parts[0].documents)
        config = parts.training_loader(job, self.mesh.world_size, apart=self._apart)
        self.dataloader = TextDataLoader(
            config, seq_len=job.training.seq_len, local_batch_size=each, **self._for_loaders
        )
        self.metrics_processor.of_data = self.dataloader.take_metrics
        logger.info(
            f"Batches: local batch size {each}, global batch size {in_step}, gradient accumulation steps "
            f"{self.accumulation_steps}, sequence length {job.training.seq_len}, total steps {job.training.steps} "
            f"(warmup {job.lr_scheduler.warmup_steps})"
        )

    def _validation_loader(self, data: resolve.DataSettings) -> TextDataLoader.Config:
        return parts.validation_loader(self.job, data, self.mesh.world_size, apart=self._apart)

    # The loop.

    def train(self) -> None:
        """Take the steps that are left, from the newest checkpoint if there is one.

        With `checkpoint.create_seed_checkpoint` save the initial weights as step 0 instead.

        Raises:
            DataError: the data can't be read further; the last whole step is saved.
            Diverged: a loss, a gradient's norm or a weight is not finite.
            NotSaved: the disk is full.
            ConfigError: in the first step async tensor parallelism fused nothing, or a block that was to be compiled ran
                eagerly.
        """
        job, checkpointer = self.job, self.checkpointer
        if job.checkpoint.create_seed_checkpoint:
            checkpointer.save(0, is_last=True)
            return
        self.report.start()
        checkpointer.load()
        first, last = self.step + 1, job.training.steps
        logger.info(f"Training starts at step {first}")
        batches = iter(self.dataloader)
        profiling = Profiler.Config(**vars(job.profiling)).build(
            global_step=self.step, base_folder=job.job.dump_folder
        )
        with profiling as profiler:
            while self.step < last:
                if self.ending is not None and self.ending.is_last(self.step):
                    checkpointer.save_now(self.step)
                    end = f"SIGTERM: the job ends after step {self.step}, which is saved; the same command resumes"
                    break
                with self._saved_before_a_data_error(first):
                    read = self._read_step(batches)
                if read is None:
                    end = f"the data were read to their end, after step {self.step} of at most {last}"
                    if self.step >= first:
                        self._validate_if_due(first, is_last=True)
                        checkpointer.save(self.step, is_last=True)
                    break
                self.step += 1
                self.gc.run(self.step)
                with self.report.measuring(self.step) as log_begins:
                    self._take_step(read, log_begins)
                if self.step == first and getattr(self.strategy, "enable_async_tensor_parallel", False):
                    with rename_option_errors():
                        async_tp.check_fused(self.mesh, self.strategy.async_tensor_parallel_unfused)  # pyrefly: ignore[missing-attribute]
                # Before the step is saved: a run that is killed between the two repeats both.
                self._validate_if_due(first, is_last=self.step == last)
                checkpointer.save(self.step, is_last=self.step == last)
                profiler.step()
                if self.step == first:
                    lower_timeouts(job, self.mesh, self.device)
            else:
                end = "Training completed"
        for name, (_, how_much) in self.dataloader.epochs_read().items():
            logger.info(f"data read of {name}: {how_much}")
        logger.info(end)
        dist.barrier()  # all end together: rank 0 may host the store

    def _read_step(self, batches: Iterator[Batch]) -> list[Batch] | None:
        """Return the batches of one step of the optimizer; None where the data end before the last of them."""
        read = []
        for _ in range(self.accumulation_steps):
            began = time.perf_counter()
            if (batch := next(batches, None)) is None:
                return None
            self.metrics_processor.data_loading_times.append(time.perf_counter() - began)
            self.metrics_processor.ntokens_since_last_log += batch[1].numel()
            read.append(batch)
        if self._loaded_rng is not None:
            # Only now: a data iterator draws a seed as it begins, which an undisturbed run has done long before.
            set_rng_state(self._loaded_rng)
            self._loaded_rng = None
        return read

    def _take_step(self, batches: list[Batch], log_begins: Callable[[], None]) -> None:
        """Forward and backward of all batches, clip, step, log."""
        self.optimizers.zero_grad()
        rates = self.lr_schedulers.get_metrics()
        own_tokens = torch.stack([(labels != IGNORED).sum() for _, labels in batches]).sum().to(self.device)
        all_tokens = _sum(own_tokens, self.batch_mesh)

        losses = []
        for number, batch in enumerate(batches, 1):
            with self._accumulating(last=number == len(batches)):
                losses.append(self.forward_backward_step(batch, all_tokens))
            self.tokens_seen += batch[1].numel()
        norm = self._clip()
        self.checkpointer.wait_for_staging()  # the step changes what is being copied
        self.optimizers.step()
        self.lr_schedulers.step()
        log_begins()

        if self.metrics_processor.should_log(self.step):  # in other steps nothing waits for the device
            self._log(sum(losses[1:], losses[0]), norm, own_tokens, all_tokens, rates)
        if not self.clipping.in_a_row:  # else the step was skipped
            self.finite.take((norm, *losses))

    def forward_backward_step(self, batch: Batch, all_tokens: torch.Tensor) -> torch.Tensor:
        """Add the gradients of one batch; return this rank's summand of its loss, see `_loss_of`."""
        loss = self._loss_of(batch, all_tokens)
        if self.pipeline is None:  # whose schedule has run the backward
            loss.backward()
        return loss.detach()

    def _loss_of(self, batch: Batch, all_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of the loss over a batch's tokens divided by `all_tokens`; without these, in validation, the sum.

        With context parallelism it is this rank's summand, of its own tokens; with a pipeline it is the same on every stage.
        """
        inputs, labels = batch[0], batch[1].to(self.device)
        tokens, positions = inputs["input"].to(self.device), inputs["positions"].to(self.device)
        if self.pipeline is None:
            return self.loss(
                self.model_parts[0](tokens, positions=positions, labels=labels), labels, all_tokens
            )
        microbatches = len(labels) // self.job.parallelism.pipeline_parallel_microbatch_size
        return self.pipeline.run(
            tokens, labels, positions, microbatches=microbatches, valid_tokens=all_tokens
        )

    def _accumulating(self, *, last: bool) -> AbstractContextManager[None]:
        """Return the context in which a batch adds its gradients, which the ranks reduce as the strategy says."""
        strategy = self.strategy
        if self.pipeline is not None:  # torch's stages see to it
            return nullcontext()
        if isinstance(strategy, DDPConfig):
            return ddp.accumulate(self._lms[0], last=last, defer=strategy.defer_grad_sync)
        return gradient_sync.accumulate(
            self._lms[0],
            last=last,
            defer=strategy.fsdp_defer_grad_sync,
            keep_gathered=strategy.fsdp_keep_gathered,
        )

    def _clip(self) -> torch.Tensor:
        """Clip the gradients, or drop them under training.skip_nan_inf; return their norm before."""
        training = self.job.training
        parameters = [parameter for lm in self._lms for parameter in lm.parameters()]
        stages: dict[str, Any] = {}
        if self.pipeline is not None:
            self.pipeline.share_gradients()
            stages = {"pp_group": self.pipeline.group, "counted": self.pipeline.counted(parameters)}
        norm = self.clipping.clip(parameters, training.max_norm or math.inf, self.step, **stages)
        self.balancer.after_backward(skipped=bool(self.clipping.in_a_row))
        if self.clipping.in_a_row >= training.skip_nan_inf_limit:
            raise Diverged(
                f"step {self.step}: the gradient was not finite in {self.clipping.in_a_row} steps in a row "
                f"(training.skip_nan_inf_limit), so training can't recover; {self.resume_point()}. Resume with a lower "
                "optimizer.lr, or exclude the data of those steps"
            )
        return norm

    def _log(
        self,
        loss: torch.Tensor,
        norm: torch.Tensor,
        own_tokens: torch.Tensor,
        all_tokens: torch.Tensor,
        rates: dict[str, float],
    ) -> None:
        mean = largest = dist_sum(loss, self.loss_mesh)
        if self.loss_mesh is not None:
            # The ranks of context parallelism have parts of the loss of the same batches.
            own_mean = _sum(loss * all_tokens / own_tokens, self.cp_mesh)
            largest = dist_max(own_mean, self.loss_mesh)
        tokens = _sum(torch.tensor(self.tokens_seen, device=self.device), self.batch_mesh)
        if not math.isfinite(mean):
            if self.clipping.in_a_row:
                return  # the step was skipped, which has been logged
            raise self._diverged("loss")
        self.metrics_processor.log(
            self.step, mean, largest, float(norm.item()), {"n_tokens_seen": int(tokens.item()), **rates}
        )
        # After the last step no loss would show it. A step that is not logged does not synchronise.
        if not self.job.training.skip_nan_inf and not norm.isfinite():
            raise self._diverged("gradient's norm")

    # Validation.

    def _validate_if_due(self, first: int, *, is_last: bool) -> None:
        validation = self.job.validation
        is_due = self.step == 1 or self.step % validation.freq == 0 or is_last
        if validation.enable and is_due and self._validated != self.step:
            with self._saved_before_a_data_error(first):
                self.validate(self._validation_loader(resolve.validation_data(self.job)))
            self._validated = self.step

    @torch.no_grad()
    def validate(self, data: TextDataLoader.Config) -> float:
        """Log the loss over `validation.steps` batches of `data`, -1: over all; return it, in nats per token."""
        validation, settings = self.job.validation, resolve.validation_data(self.job)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.metrics_processor.paused())
            for lm in self._lms if validation.unshard else ():
                stack.enter_context(gradient_sync.unsharded(lm))
            for lm in self._lms:
                lm.eval()
            total, own_tokens = torch.zeros((), device=self.device), torch.zeros((), dtype=torch.int64)
            loader = TextDataLoader(
                data,
                seq_len=settings.seq_len,
                local_batch_size=settings.local_batch_size,
                **self._for_loaders,
            )
            for batch in islice(loader, None if validation.steps == -1 else validation.steps):
                total += self._loss_of(batch)
                own_tokens += (batch[1] != IGNORED).sum()
            all_tokens = int(_sum(own_tokens.to(self.device), self.batch_mesh).item())
            loss = dist_sum(total, self.loss_mesh) / all_tokens
            self.metrics_processor.log_validation(loss, self.step)
            for lm in self._lms:
                lm.train()
        return loss

    def evaluate(self, checkpoint: Path) -> dict[str, float]:
        """Return the validation loss of the weights of a checkpoint, in nats per token, by the titles of the sources."""
        self.step = self.checkpointer.load_weights(checkpoint)
        data = resolve.validation_data(self.job)
        return {
            source.title: self.validate(self._validation_loader(data._replace(sources=(source,))))
            for source in data.sources
        }

    # Saving, and the end.

    def state_dict(self) -> dict[str, Any]:
        """Return step, tokens and random generators; one copy of these, since all ranks draw alike."""
        return {"step": self.step, "ntokens_seen": self.tokens_seen, "rng": get_rng_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the random generators wait for the first batch."""
        self.step, self.tokens_seen = state_dict["step"], state_dict["ntokens_seen"]
        self._loaded_rng = state_dict["rng"]

    @contextlib.contextmanager
    def _saved_before_a_data_error(self, first: int) -> Iterator[None]:
        """Save the last step before a DataError of the body, raised on all ranks, ends the run."""
        try:
            yield
        except DataError as error:
            if self.step < first:
                raise
            self.checkpointer.save_now(self.step)
            raise DataError(f"after step {self.step}: {error}; {self.resume_point()}") from error

    def _diverged(self, what: str) -> Diverged:
        return Diverged(
            f"step {self.step}: the {what} is not finite, so the weights are lost; {self.resume_point()}. Start the job "
            "again with a lower optimizer.lr or more lr_scheduler.warmup_steps"
        )

    def _show_job(self, values: dict[str, Any]) -> None:
        """Log or write the job's values, as it asks for."""
        job = self.job.job
        if job.print_config:
            logger.info(f"Running with configs: {json.dumps(values, indent=2, ensure_ascii=False)}")
        if job.save_config_file is not None and dist.get_rank() == 0:
            text = json.dumps(values, indent=2, ensure_ascii=False)
            write_whole(Path(job.dump_folder, job.save_config_file), text)

    def resume_point(self) -> str:
        """Return from where the job can resume, in words, once pending writes are done."""
        if not self.job.checkpoint.enable:
            return "nothing was saved (checkpoint.enable = false)"
        return self.checkpointer.resume_point()

    def close(self) -> None:
        """Finish pending writes (checkpoint, metrics) and leave the process group."""
        self.checkpointer.close()
        self.metrics_processor.close()
        dist.destroy_process_group()


def _sum(x: torch.Tensor, mesh: DeviceMesh | None) -> torch.Tensor:
    return x if mesh is None else dist_sum_tensor(x, mesh)
