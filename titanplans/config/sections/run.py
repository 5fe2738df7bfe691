"""The output of a job, and how it runs: [job], [metrics], [profiling], [comm], [debug], [experimental]."""

from typing import Annotated

from annotated_types import Ge, Le

from titanplans.config.compatibility import groups
from titanplans.config.options import Options
from titanplans.config.values import Constraint, FilePath, Natural32, NaturalInt, PositiveInt, Seed

Seconds = Annotated[int, Ge(1), Le(365 * 24 * 3600)]
FilePrefix = Annotated[
    str,
    Constraint("no folder, and 200 characters at most", lambda value: "/" not in value and len(value) <= 200),
]


class Job(Options, section="job"):
    """The job as a whole."""

    dump_folder: FilePath = "./outputs"
    """Folder for everything the job writes: checkpoints, metrics, traces."""

    description: str = ""
    """What the job is for; printed when it starts."""

    print_config: bool = False
    """Log the values of the job as JSON, then train. (The flag --print-config prints the job and stops.)"""

    save_config_file: FilePath | None = None
    """File, relative to dump_folder, into which the values of the job are written as JSON."""


class Metrics(Options, section="metrics"):
    """The metrics: how often they are logged, and where."""

    log_freq: PositiveInt = 10
    """Steps between two log lines; the first step is always logged."""

    enable_tensorboard: bool = False
    """Write the metrics for TensorBoard, too."""

    disable_color_printing: bool = False
    """Log without colours."""

    save_tb_folder: FilePath = "tb"
    """Folder of the TensorBoard and W&B files, relative to dump_folder."""

    save_for_all_ranks: bool = False
    """Write the metrics of every rank, each into a separate folder; false: only the metrics of rank 0."""

    enable_wandb: bool = False
    """Send the metrics to Weights & Biases, too (WANDB_PROJECT, WANDB_RUN_NAME, ... are read from the environment)."""

    enable_jsonl: bool = False
    """Write the metrics into dump_folder/metrics.jsonl, too: one JSON object per logged step."""

    measure_first_step: bool = True
    """Measure the first step: write its communication, its compiled graphs and a pipeline's times into
    dump_folder/parallelism.json."""

    estimate: bool = True
    """Estimate the memory and the time of a step in the background while the job starts; log a warning if the job does not
    fit, and the estimate next to what is measured. Only on CUDA and ROCm."""


class Profiling(Options, section="profiling", refuses=groups.profiling):
    """Traces of where time and memory go."""

    enable_profiling: bool = False
    """Record traces with torch.profiler."""

    save_traces_folder: FilePath = "profile_traces"
    """Folder of the traces, relative to dump_folder."""

    profile_freq: PositiveInt = 10
    """Steps from one trace to the next; at least profiler_warmup + profiler_active."""

    profiler_active: PositiveInt = 1
    """Steps that each trace records."""

    profiler_warmup: NaturalInt = 3
    """Steps that the profiler runs before each trace, unrecorded."""

    profiler_repeat: NaturalInt | None = None
    """Number of traces to record; 0 or unset: until the job ends."""

    profiler_skip_first: NaturalInt | None = None
    """Steps before the first trace's warm-up; unset: none."""

    enable_memory_snapshot: bool = False
    """Record snapshots of the CUDA allocator's memory (for pytorch.org/memory_viz)."""

    memory_snapshot_freq: PositiveInt | None = None
    """Steps from one snapshot to the next; unset: profile_freq."""

    memory_snapshot_max_entries: PositiveInt = 1_000_000
    """Allocator events that a snapshot keeps; the oldest are dropped."""

    save_memory_snapshot_folder: FilePath = "memory_snapshot"
    """Folder of the snapshots, relative to dump_folder."""


class Comm(Options, section="comm"):
    """Communication between the ranks."""

    init_timeout_seconds: Seconds = 300
    """Timeout of a collective up to the end of the first step (start-up and compilation), in seconds."""

    train_timeout_seconds: Seconds = 100
    """Timeout of a collective after the first step, in seconds."""

    trace_buf_size: Natural32 | None = None
    """Events that torch's flight recorder keeps; 0: it is off; unset: 20,000, or 0 with gloo, which records none."""

    save_traces_folder: FilePath = "comm_traces"
    """Folder of the flight recorder's dumps, relative to dump_folder."""

    save_traces_file_prefix: FilePrefix = "rank_"
    """Prefix of the names of the flight recorder's files."""


class Debug(Options, section="debug", refuses=groups.debug):
    """Reproducibility and checks."""

    seed: Seed | None = None
    """Seed of the initial weights and of every random choice; unset: rank 0 draws one."""

    deterministic: bool = False
    """Use deterministic algorithms only; slower."""

    deterministic_warn_only: bool = False
    """Under deterministic: warn of an operation that has no deterministic algorithm, instead of stopping."""

    detect_anomaly: bool = False
    """Record where in the forward each operation was called, to find the origin of a NaN gradient; very slow."""


class Experimental(Options, section="experimental"):
    """The user's own code."""

    custom_import: str = ""
    """Module to import before the model is built, by dotted name: where a package registers its plans."""
