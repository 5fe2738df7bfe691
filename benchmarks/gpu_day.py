"""Run all tests, proofs and benchmarks that need a GPU in one command, and write the results to docs/gpu/<device>.md.

    make gpu                                                    # all parts
    make gpu PARTS="tests verify" MODELS="gla qwen3"            # some parts, for some models
    python -m benchmarks.gpu_day --parts step async_tp
    python -m benchmarks.gpu_day --parts verify --quick --at-once 15
    python -m benchmarks.gpu_day --device cpu                   # a dry run: the same parts in tiny sizes on a CPU

Each run is a separate process, or processes of torchrun, with a time limit. If a run fails or takes too long, its last
lines are recorded, and the next run begins. Skipped runs are recorded with the reason, such as too few GPUs. The page is
rewritten after each run. Exit status: 0, 1 if a run failed, 2 without CUDA.
"""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu_runs import ROOT, Result, Run, carry_out, page
from titanplans.training.launch.exit_status import finish

DEGREES = (2, 4, 8)


class Machine(NamedTuple):
    """The machine, and the options that apply to all parts."""

    device: str
    """cuda or cpu."""
    name: str
    count: int
    """The number of GPUs, or in a dry run the number of processes."""
    no_trainer: str | None
    """The reason why the installed torch or torchtitan can't run jobs; None: they can."""
    models: tuple[str, ...]
    """The models to prove."""
    quick: bool

    def sized(self, *small: str) -> tuple[str, ...]:
        """In a dry run return `small`, a benchmark's options for tiny sizes; otherwise return no options."""
        return small if self.device == "cpu" else ()


Part = Callable[[Machine], Iterator[Run]]


def tests(m: Machine) -> Iterator[Run]:
    """The tests marked `cuda`: FLA's kernels in split models, groups over NCCL, float8, steps without synchronization."""
    files = ("tests/cuda", "tests/parallel/mesh/test_process_group.py")
    missing = None if importlib.util.find_spec("pytest") else "pytest is not installed"
    yield Run("pytest -m cuda", ("-m", "pytest", "-m", "cuda", "-q", "-rs", *files), 30, missing)


def step(m: Machine) -> Iterator[Run]:
    """A training step, eager and compiled: tokens/s, memory, MFU."""
    yield from _steps(m, "eager", "compile")


def float8(m: Machine) -> Iterator[Run]:
    """A compiled step in float8 with each recipe, compared to bfloat16."""
    yield from _steps(m, "compile", "float8+compile", "rowwise+compile", "rowwise_with_gw_hp+compile")


def async_tp(m: Machine) -> Iterator[Run]:
    """A compiled step with and without async tensor parallelism, and the number of fused collectives."""
    needs = "needs CUDA and NCCL" if m.device == "cpu" else None
    for tp in DEGREES:
        few = _too_few(m, tp)
        command = ("-m", "benchmarks.step", "--models", "qwen3", "--tp", str(tp))
        yield Run(f"step, tp {tp}", (*command, "--variants", "compile", "async+compile"), 20, needs or few)


def host_time(m: Machine) -> Iterator[Run]:
    """Host time of a step on one thread of this machine's CPU."""
    yield _benchmark("host_time", *m.sized("--rounds", "2", "--only", "unsplit", "tp 2"))


def loss(m: Machine) -> Iterator[Run]:
    """Memory and time of the loss on this machine's CPU: fused, sharded, and torchtitan's chunked loss."""
    small = ("--tokens", "64", "--vocabulary", "512", "--hidden", "64")
    yield _benchmark("loss", *m.sized(*small))._replace(skipped=m.no_trainer)


def tp_step(m: Machine) -> Iterator[Run]:
    """A step over two CPU processes with gloo."""
    yield _benchmark("tp_step", *m.sized("--rounds", "1"))._replace(skipped=m.no_trainer)


def parallelize(m: Machine) -> Iterator[Run]:
    """Time and memory to parallelise a model on meta."""
    yield _benchmark(
        "parallelize", *m.sized("--models", "gla-7B", "--worlds", "8", "--repeats", "1", "--only", "cost")
    )


def weights(m: Machine) -> Iterator[Run]:
    """Loading and saving of Hugging Face folders on this machine's disk."""
    for part in ("start", "bandwidth"):
        yield _benchmark("weights", part, *m.sized("--gigabytes", "0.02", "--rounds", "1"))


def optimizers(m: Machine) -> Iterator[Run]:
    """The optimizer step of Muon and of AdamW, compared on this machine's CPU."""
    yield _benchmark("optimizers", *m.sized("--rounds", "1", "--hidden", "128", "--layers", "1"))


def checkpoints(m: Machine) -> Iterator[Run]:
    """Checkpoints with checksums on this machine's disk, and the memory of a job that saves often: it needs torchtitan."""
    small = ("--gigabytes", "0.02", "--rounds", "1", "--steps", "12")
    yield _benchmark("checkpoints", *m.sized(*small))._replace(skipped=m.no_trainer)


def verify(m: Machine) -> Iterator[Run]:
    """The proof of each plan with GPU kernels, first with all ranks on one GPU, then with one rank per GPU over NCCL."""
    quick = ("--quick",) if m.quick else ()
    for model in m.models if m.device == "cuda" else ():
        command = (
            "-m",
            "titanplans",
            "verify",
            model,
            "--device",
            "cuda",
            "--tp",
            "2",
            "--cp",
            "1,2",
            *quick,
        )
        yield Run(f"{model}, on one GPU", command, 15)
    for tp in DEGREES:
        few = _too_few(m, tp)
        for model in m.models:
            options = (model, "--process-group", "--tp", str(tp), *quick)
            ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp))
            if few is None:
                yield Run(f"{model}, tp {tp}", (*ranks, "-m", "titanplans", "verify", *options), 15)
        if few is not None:
            yield Run(f"every plan, tp {tp}", skipped=few)


PARTS: dict[str, Part] = {
    part.__name__: part
    for part in (tests, step, float8, async_tp, host_time, loss, tp_step, parallelize, weights, optimizers)
} | {"checkpoints": checkpoints, "verify": verify}
"""The parts in the order in which they run, the longest last."""


def _benchmark(name: str, *options: str) -> Run:
    missing = None if (ROOT / "benchmarks" / f"{name}.py").exists() else f"there is no benchmarks/{name}.py"
    return Run(" ".join((name, *options)), ("-m", f"benchmarks.{name}", *options), 20, missing)


def _steps(m: Machine, *variants: str) -> Iterator[Run]:
    for tp in (1, *DEGREES):
        command = ("-m", "benchmarks.step", "--variants", *variants, "--tp", str(tp))
        small = m.sized("--models", "qwen3", "--rounds", "2")
        yield Run(f"step, tp {tp}", (*command, *small), 45, _too_few(m, tp))


def _too_few(m: Machine, ranks: int) -> str | None:
    available = (
        f"{m.count} GPU{'s' * (m.count > 1)}" if m.device == "cuda" else f"a dry run of {m.count} processes"
    )
    return None if ranks <= m.count else f"needs {ranks} GPUs, and this is {available}"


def machine_of(device: str, models: list[str] | None, quick: bool) -> Machine | None:
    """Return this machine; None if `device` is "cuda" and there is no CUDA device."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return None
    from titanplans.cli.verify.subject import every_model
    from titanplans.training.trainer.device import DeviceMemory, no_trainer

    count = torch.cuda.device_count() if device == "cuda" else 2
    name = DeviceMemory(torch.device(device)).name
    name += f", {count} GPUs" if device == "cuda" and count > 1 else ""
    return Machine(device, name, count, no_trainer(), tuple(models or every_model()), quick)


def main(argv: list[str] | None = None) -> int:
    """Run the parts that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="named models to prove; default: all")
    parser.add_argument("--quick", action="store_true", help="prove each condition once")
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="number of proofs to run at once, at most one per core: a proof mostly compiles kernels on the CPU",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a dry run in tiny sizes"
    )
    parser.add_argument(
        "--page", type=Path, help="default: docs/gpu/<device>.md; in a dry run outputs/gpu-day.md"
    )
    options = parser.parse_args(argv)
    machine = machine_of(options.device, options.models, options.quick)
    if machine is None:
        print(
            "error: torch finds no CUDA device; use --device cpu for a dry run of the same parts",
            file=sys.stderr,
        )
        return 2
    slug = re.sub(r"[^a-z0-9]+", "-", machine.name.lower()).strip("-")
    target = options.page or ROOT / (
        f"docs/gpu/{slug}.md" if machine.device == "cuda" else "outputs/gpu-day.md"
    )
    target.parent.mkdir(parents=True, exist_ok=True)
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if machine.device == "cpu" else {})
    about = {name: (part.__doc__ or "").strip() for name, part in PARTS.items()}
    results: list[Result] = []
    for part in options.parts:
        is_sequential = part != "verify" or options.at_once == 1

        def name(run: Run, part: str = part, end: str = " " if is_sequential else "\n") -> None:
            print(f"{part}: {run.name} ...", end=end, flush=True)

        runs = PARTS[part](machine)
        for result in carry_out(part, runs, environment, 1 if is_sequential else options.at_once, name):
            results.append(result)
            label = "" if is_sequential else f"{part}: {result.run.name} ... "
            print(f"{label}{result.outcome}, {result.seconds:.0f} s", flush=True)
            target.write_text(page(machine.name, results, about, dry=machine.device == "cpu"))
    print(f"written to {target}")
    return int(any(one.outcome not in ("done", "refused", "skipped") for one in results))


if __name__ == "__main__":
    finish(main())
