"""Inject faults into a training job at random moments, restart it, and compare its losses with an undisturbed run.

    python -m tests.support.survival --faults 1000 --seed 7     # make survive N=1000

A job on two CPU ranks takes some milliseconds per step and saves a checkpoint every second step, at random synchronously or
asynchronously. There are four kinds of faults. A rank, all processes, the launcher or a data worker is killed while the job
starts, trains or saves. A file of the newest checkpoint is truncated, or one of its bits is flipped. The disk is full. A
gradient is not finite. After each fault the job is started again with the same command, or as the error advises. At the end
every logged loss must be bit-identical to the loss of an undisturbed run. The printed counts are faults, resumes, mismatches
(of losses), orphans (processes that outlived a job), files (lost, damaged or left over), and unexplained (ends without a
one-line error).

The seed repeats the choice of faults, but not their exact moments.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

JOB = """
[job]
dump_folder = "out"
[model]
config = "model.json"
[training]
dataset_path = "text"
local_batch_size = 2
seq_len = 16
steps = 1000000
mixed_precision_param = "float32"
dataloader.num_workers = 1
[lr_scheduler]
warmup_steps = 2
total_steps = 1000000
[activation_checkpoint]
mode = "none"
[checkpoint]
enable = true
interval = 2
keep_latest_k = 3
[metrics]
log_freq = 1
enable_jsonl = true
measure_first_step = false
[debug]
seed = 5
"""
MODEL = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL |= {"vocab_size": 4096, "intermediate_size": 32, "tie_word_embeddings": True}
PARALLEL = {
    "tp": ("--parallelism.tensor_parallel_degree=2",),
    "fsdp": ("--parallelism.data_parallel_shard_degree=2",),
}
KILLS = ("rank", "all", "launcher", "worker")
FAULTS = (*KILLS, "truncated", "flip", "disk", "nan")
SECONDS = 120  # a process that takes longer counts as hanging
SHOWN = ("faults", "resumes", "mismatches", "orphans", "files", "unexplained")
FAULTS_PER_JOB = 50  # the losses are compared after this many faults
GRACE = 10  # seconds in which the other processes have to end after the launcher's end


class Life:
    """One start of the job: a process forked from this one, and the processes that it starts."""

    def __init__(self, folder: Path, options: tuple[str, ...], prepare: Callable[[], None] | None):
        self.output_path = folder / "output"
        with self.output_path.open("wb") as output:
            self.pid = os.fork()
            if self.pid == 0:
                self._run(folder, options, prepare, output.fileno())
        self.status: int | None = None
        self.orphans = 0
        self.orphan_names: list[str] = []

    def _run(
        self, folder: Path, options: tuple[str, ...], prepare: Callable[[], None] | None, output: int
    ) -> None:
        status = 70
        try:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(folder)
            if prepare is not None:
                prepare()
            from titanplans.training.launch.main import main

            status = main(["job.toml", *options])
        except BaseException:  # noqa: BLE001  this process ends here, whatever was raised
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    def is_running(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait until `condition()` is true; return False if the job ends earlier."""
        deadline = time.monotonic() + SECONDS
        while not condition():
            if not self.is_running():
                return False
            if time.monotonic() > deadline:
                raise AssertionError(f"the job hangs:\n{self.output}")
            time.sleep(0.005)
        return True

    def ranks(self) -> list[int]:
        return children(self.pid)

    def end(self) -> int:
        """Wait until launcher and ranks have ended; count and kill the processes that do not. Return the exit status."""
        self.wait_until(lambda: False)
        assert self.status is not None
        self.wait_for(_ranks_left)
        return self.status

    def wait_for(self, left_behind: Callable[[], list[int]]) -> None:
        deadline = time.monotonic() + GRACE
        while remaining := left_behind():
            if time.monotonic() > deadline:
                self.orphans += len(remaining)
                self.orphan_names += map(_name, remaining)
                for pid in remaining:
                    os.kill(pid, signal.SIGKILL)
                deadline += GRACE
            time.sleep(0.005)


def children(pid: int) -> list[int]:
    pids = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the process has ended
            pids += map(int, task.read_text().split())
    return pids


def _left_behind() -> list[int]:
    """Return the children of this process, which adopts processes whose parent has ended (PR_SET_CHILD_SUBREAPER)."""
    while (pids := children(os.getpid())) and os.waitpid(-1, os.WNOHANG)[0]:
        pass
    return pids


def _ranks_left() -> list[int]:
    """Return the processes of `_left_behind` except data workers, which end within five seconds and write nothing."""
    return [pid for pid in _left_behind() if _name(pid) != "pt_data_worker"]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class Survival:
    """One job, and the counts of its faults and of the problems that they caused."""

    def __init__(self, folder: Path, seed: int, parallel: str, small_disk: bool):
        self.folder, self.parallel, self.draw = folder, parallel, random.Random(seed)
        self.kinds = [kind for kind in FAULTS if kind != "disk" or small_disk]
        self.checkpoints = folder / "out" / "checkpoint"
        self.counts: Counter[str] = Counter()
        self.kind_counts: Counter[str] = Counter()
        self.losses: dict[int, set[float]] = {}
        self.seconds_to_start = 1.0
        self.next_step = 1  # the step at which the next start has to resume
        self.problems: list[str] = []
        write_job(folder)

    # Starting

    def start(self, *options: str, prepare: Callable[[], None] | None = None) -> Life:
        mode = f"--checkpoint.async_mode={self.draw.choice(['disabled', 'async'])}"
        return Life(self.folder, (*PARALLEL[self.parallel], mode, *options), prepare)

    def finish(self, life: Life) -> int:
        """Wait for the end of a start; count orphans, check where it resumed, and check its files."""
        status = life.end()
        if life.orphans:
            self.problem("orphans", f"{life.orphans} processes were left: {life.orphan_names}", life)
        started = re.search(r"Training starts at step (\d+)", life.output)
        if started:
            self.counts["resumes"] += 1
            if int(started[1]) != self.next_step:
                self.problem("files", f"it resumed at step {started[1]}, not {self.next_step}", life)
        self.inspect(life)
        return status

    def inspect(self, life: Life) -> None:
        """Collect the losses, check every checkpoint, and set the step at which training has to resume."""
        from titanplans.training.checkpoint import folder
        from titanplans.training.checkpoint.manifest import damage
        from titanplans.training.trainer.jsonl import read_metrics

        # If this start logged no step, the file was written by an earlier start.
        for metrics in (
            read_metrics(self.folder / "out" / "metrics.jsonl") if "  loss " in life.output else ()
        ):
            self.losses.setdefault(metrics["step"], set()).add(metrics["loss_metrics/global_avg_loss"])
        present = folder.steps(self.checkpoints)
        for step in present:
            if reason := damage(folder.checkpoint_path(self.checkpoints, step)):
                self.problem("files", reason, life)
        newest = max(present, default=0)
        if newest + 1 < self.next_step:
            self.problem("files", f"step-{self.next_step - 1} is lost", life)
        self.next_step = newest + 1

    def problem(self, kind: str, text: str, life: Life) -> None:
        self.counts[kind] += 1
        self.problems.append(f"{kind}: {text}\n    {life.output.strip()[-1500:]}")
        print(self.problems[-1], flush=True)

    # Faults

    def fault(self) -> None:
        kind = self.draw.choice(KILLS if self.draw.random() < 0.5 else self.kinds)
        self.counts["faults"] += 1
        self.kind_counts[kind] += 1
        print(f"{self.counts['faults']:5} {self.parallel:5} {kind:9} at step {self.next_step}", flush=True)
        if kind in KILLS:
            self.kill(kind)
        elif kind in ("truncated", "flip"):
            self.kill("all")
            self.damage(kind)
        elif kind == "disk":
            self.fill_the_disk()
        else:
            at = self.next_step + self.draw.randrange(6)
            life = self.start("--metrics.log_freq=7", prepare=lambda: _poison(at))
            self.check_explained_end(
                life, "not finite.*; (the newest complete checkpoint|there is no checkpoint)"
            )

    def kill(self, kind: str) -> None:
        """Kill a process, or all processes, while the job starts, trains or saves."""
        life, draw = self.start(), self.draw
        moment = draw.choice(["starts", "trains", "saves"])
        if moment == "starts" and kind != "worker":
            time.sleep(draw.uniform(0, self.seconds_to_start))
        else:
            begin = time.monotonic()
            if not life.wait_until(lambda: "  loss " in life.output):
                raise AssertionError(f"the job did not start:\n{life.output}")
            self.seconds_to_start = time.monotonic() - begin
            time.sleep(draw.uniform(0, 0.3))
            if moment == "saves":
                life.wait_until(lambda: any(self.checkpoints.glob(".step-*.writing")))
                time.sleep(draw.uniform(0, 0.02))
        ranks = life.ranks()
        workers = [pid for rank in ranks for pid in children(rank)]
        if kind == "all":
            os.killpg(life.pid, signal.SIGKILL)
        else:
            victims = {"rank": ranks, "launcher": [life.pid], "worker": workers}[kind] or [life.pid]
            victim = draw.choice(victims)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if self.finish(life) == 0:
            self.problem("unexplained", f"{kind} was killed, and the exit status is 0", life)

    def damage(self, kind: str) -> None:
        """Damage a file of the newest checkpoint, check that it is refused, and do what the error advises."""
        from titanplans.training.checkpoint import folder

        present = folder.steps(self.checkpoints)
        if not present:
            return
        newest = folder.checkpoint_path(self.checkpoints, present[-1])
        path = self.draw.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
        content = bytearray(path.read_bytes())
        position = self.draw.randrange(len(content))
        if kind == "flip":
            content[position] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content if kind == "flip" else content[:position])
        life = self.start()
        status, output = life.end(), life.output
        advised = re.search(
            r"remove (step-\d+), and the same command resumes from step-(\d+), the newest", output
        )
        one_line = output.count("error:") == 1 and "Traceback" not in output
        if status != 2 or not one_line or str(path.relative_to(self.folder)) not in output:
            self.problem("unexplained", f"{path.name} was {kind}, and the exit status is {status}", life)
        if advised:
            shutil.rmtree(self.checkpoints / advised[1])
            self.next_step = int(advised[2]) + 1
        else:
            if "no other checkpoint is intact" not in output or len(present) > 1:
                self.problem("unexplained", f"none of the steps {present} is offered", life)
            shutil.rmtree(self.checkpoints)
            self.next_step = 1

    def fill_the_disk(self) -> None:
        """Leave too little space for a checkpoint (sometimes almost enough), and check how the job ends."""
        filler = self.folder / "out" / "filler"
        filler.parent.mkdir(exist_ok=True)
        size = max((_size(path) for path in self.checkpoints.glob("step-*")), default=800_000)
        room = self.draw.choice([self.draw.randrange(size), size - self.draw.randrange(size // 12)])
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(filler.parent).free - room))
        life = self.start()
        self.check_explained_end(life, "no space is left|B of free space, but")
        filler.unlink()

    def check_explained_end(self, life: Life, pattern: str) -> None:
        """Check that the job ends with status 1, one error line that has `pattern`, and no partly written checkpoint."""
        status = self.finish(life)
        errors = [line for line in life.output.splitlines() if line.startswith("error: ")]
        if status != 1 or len(errors) != 1 or not re.search(pattern, errors[0]) or "Traceback" in life.output:
            self.problem("unexplained", f"the exit status is {status}", life)
        if partial := [path.name for path in self.checkpoints.glob(".step-*.writing")]:
            self.problem("files", f"{partial} were left over", life)

    # The end

    def compare(self) -> None:
        """Finish the job, run the same job undisturbed, and compare the losses."""
        steps = max(self.losses, default=0) + 4
        last = self.start(f"--training.steps={steps}")
        if self.finish(last) != 0:
            self.problem("unexplained", "the last start did not finish", last)
        ours = re.compile(r"step-\d+|titanplans\.lock")
        if leftovers := [path.name for path in self.checkpoints.iterdir() if not ours.fullmatch(path.name)]:
            self.problem("files", f"{leftovers} were left over", last)
        shutil.rmtree(self.folder / "out")
        disturbed, self.losses, self.next_step = self.losses, {}, 1
        undisturbed = self.start(f"--training.steps={steps}", "--checkpoint.no-enable")
        undisturbed.end()
        undisturbed.wait_for(_left_behind)
        if undisturbed.orphans:
            self.problem(
                "orphans",
                f"{undisturbed.orphans} processes were left: {undisturbed.orphan_names}",
                undisturbed,
            )
        self.inspect(undisturbed)
        for step, losses in disturbed.items():
            if losses != self.losses.get(step):
                self.problem(
                    "mismatches", f"step {step}: {losses}, undisturbed {self.losses.get(step)}", undisturbed
                )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _poison(at: int) -> None:
    """Make the gradient of one rank not finite in step `at`, as a memory error might."""
    from titanplans.training.trainer.trainer import Trainer

    real = Trainer.forward_backward_step

    def forward_backward_step(self: Trainer, *batch: object) -> object:
        loss = real(self, *batch)
        if self.step == at and os.environ["RANK"] == "1":
            next(p for p in self.model_parts[0].lm.parameters() if p.grad is not None).grad.mul_(float("nan"))
        return loss

    Trainer.forward_backward_step = forward_backward_step  # type: ignore[method-assign]


def write_job(folder: Path) -> None:
    (folder / "job.toml").write_text(JOB)
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "text").mkdir()
    for index in range(40):
        words = " ".join(f"the {i * index % 97} quick {i + index} foxes" for i in range(40))
        (folder / "text" / f"{index}.txt").write_text(words)


def mount_small_disk(path: Path, megabytes: int) -> bool:
    """Mount a small disk for this process and its children; return False if that is not permitted."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.getuid(), os.getgid()
    new_user, new_mounts, private = 0x10000000, 0x00020000, 0x4000 | 0x40000
    if libc.unshare(new_user | new_mounts) != 0:
        return False
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    libc.mount(b"none", b"/", None, private, None)
    size = f"size={megabytes}m".encode()
    return libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, size) == 0


def survive(faults: int, seed: int, results: str) -> None:
    """Inject the faults and write the counts as JSON to the file `results`. Called in a forked process."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    import titanplans.training.launch.main
    import titanplans.training.trainer.trainer  # noqa: F401
    from tests.support import rank_imports  # noqa: F401

    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    begin = time.monotonic()
    base = Path(tempfile.mkdtemp())  # a forked rank that ends normally would remove a TemporaryDirectory
    (base / "tmp").mkdir()
    (base / "disk").mkdir()
    is_small_disk = mount_small_disk(base / "disk", 12)
    os.environ["TMPDIR"] = tempfile.tempdir = f"{base}/tmp"
    try:
        jobs = max(2, -(-faults // FAULTS_PER_JOB))
        for index in range(jobs):
            parallel = list(PARALLEL)[index % 2]
            folder = base / "disk" / parallel
            folder.mkdir()
            survival = Survival(folder, seed + index, parallel, is_small_disk)
            for _ in range(faults * (index + 1) // jobs - faults * index // jobs):
                survival.fault()
            survival.compare()
            counts += survival.counts
            kinds += survival.kind_counts
            shutil.rmtree(folder)
            print(_summary(counts, begin), flush=True)
    finally:
        if is_small_disk:
            ctypes.CDLL(None).umount2(os.fsencode(base / "disk"), 2)
        shutil.rmtree(base)
    print(f"seed {seed}: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}", flush=True)
    Path(results).write_text(json.dumps({name: counts[name] for name in SHOWN}))


def _summary(counts: Counter[str], begin: float) -> str:
    seconds = time.monotonic() - begin
    return f"{'  '.join(f'{name} {counts[name]}' for name in SHOWN)}  in {seconds:.0f} s"


def run(faults: int, seed: int) -> dict[str, int]:
    """Inject this many faults, and return the counts."""
    from tests.support import process_groups

    with tempfile.NamedTemporaryFile() as results:
        process = multiprocessing.get_context(process_groups.start_method()).Process(
            target=survive, args=(faults, seed, results.name)
        )
        process.start()
        process.join()
        assert process.exitcode == 0
        return json.loads(Path(results.name).read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    counts = run(options.faults, options.seed)
    return int(any(counts[name] for name in ("mismatches", "orphans", "files", "unexplained")))


if __name__ == "__main__":
    # the forked process unpickles functions by the name of their module, which must not be __main__
    from tests.support import survival

    status = survival.main()
    sys.stdout.flush()
    os._exit(status)
