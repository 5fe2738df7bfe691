"""Print the estimated memory of a rank at long sequences and with a mixture of experts, as in docs/context.md and
docs/benchmarks.md.

    python -m benchmarks.memory [context] [experts]

Each row or cell is the forecast of `titanplans estimate` for one of the 8 GPUs of a machine, at the peak of a step, in GiB.
"""

import sys
import tempfile
from pathlib import Path

from titanplans.config import JobConfig, load_job
from titanplans.foresight.forecast import Forecast
from titanplans.foresight.hardware import find_gpu
from titanplans.foresight.memory import ACTIVATIONS, BACKWARD, LOSS, PARTS
from titanplans.foresight.processes import forecast_in_process, rehearsing
from titanplans.foresight.rehearsal import GRADIENTS, OPTIMIZER, WEIGHTS
from titanplans.training.launch.exit_status import finish

GPUS, PROCESSES = 8, 2
MODELS, LENGTHS, DEGREES = ("llama:3.1-8B", "gla:7B"), (32_768, 1_048_576), (2, 4, 8)
MESHES = {(1, 1): "FSDP 8", (1, 8): "FSDP 8, ep 8", (2, 1): "FSDP 4, tp 2", (2, 8): "FSDP 4, tp 2, ep 8"}
"""The layouts of the experts' table by their degrees of tp and ep."""
JOB = """
[model]
name = "{name}"
flavor = "{flavor}"
[training]
local_batch_size = 1
mixed_precision_param = "bfloat16"
[activation_checkpoint]
mode = "full"
"""


def main() -> None:
    parts = sys.argv[1:] or ["context", "experts"]
    if unknown := set(parts) - {"context", "experts"}:
        sys.exit(f"{', '.join(sorted(unknown))}: no such table; choose context or experts")
    if "context" in parts:
        context()
    if "experts" in parts:
        experts()


def context() -> None:
    layouts = [{}, *({"context": n} for n in DEGREES), *({"tensor": n} for n in DEGREES)]
    titles = ["cp 1", *(f"cp {n}" for n in DEGREES), *(f"tp {n}" for n in DEGREES)]
    rows = [(model, tokens) for model in MODELS for tokens in LENGTHS]
    jobs = [job_of(model, tokens, layout) for model, tokens in rows for layout in layouts]
    cells = [f"{forecast.ranks[0].memory.live / 2**30:.1f}" for forecast in forecasts(jobs)]
    print_row("model", "tokens", *titles)
    print_row("---", "---:", *["---:"] * len(titles))
    for index, (model, tokens) in enumerate(rows):
        print_row(model, f"{tokens:,}", *cells[index * len(layouts) : (index + 1) * len(layouts)])


def experts() -> None:
    jobs = [job_of("qwen3_moe:30B-A3B", 4096, {"tensor": tp, "expert": ep}) for tp, ep in MESHES]
    columns = (WEIGHTS, GRADIENTS, OPTIMIZER)
    print_row("layout", *columns, "activations and backward", "gathered and buffers", "sum", "reserved")
    print_row("---", *["---:"] * (len(columns) + 4))
    for title, forecast in zip(MESHES.values(), forecasts(jobs), strict=True):
        memory = forecast.ranks[0].memory
        computed = {ACTIVATIONS, LOSS, BACKWARD}
        groups = [*([part] for part in columns), computed, PARTS.keys() - computed - {*columns}]
        sizes = [sum(memory.parts.get(part, 0) for part in group) for group in groups]
        sizes += [memory.live, memory.standard.reserved]
        print_row(title, *(f"{size / 2**30:.1f}" for size in sizes))


def job_of(model: str, tokens: int, degrees: dict[str, int]) -> JobConfig:
    """Return a job of one sequence a data-parallel rank."""
    name, _, flavor = model.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.toml")
        file.write_text(JOB.format(name=name, flavor=flavor))
        options = [f"--parallelism.{kind}_parallel_degree={degree}" for kind, degree in degrees.items()]
        return load_job([str(file), f"--training.seq_len={tokens}", *options])


def forecasts(jobs: list[JobConfig]) -> list[Forecast]:
    gpu = find_gpu("H100")
    with rehearsing(gpu, PROCESSES) as pool:
        results = [pool.submit(forecast_in_process, job, GPUS, gpu) for job in jobs]
        return [result.result()[0] for result in results]


def print_row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
    finish(0)
