"""Kill a training job at random moments, break what it has left behind, start it again: are the losses the same?

    python -m tests.support.survival --faults 1000 --seed 7     # make survive N=1000; the seed repeats the faults

A job on two ranks of a CPU, of some milliseconds a step, saves every second step, at random in the thread of training or
in another. It is killed (a rank, all processes, the launcher, a worker of a loader) while it starts, trains or saves;
its newest checkpoint is cut or a bit of it flipped; the disk is full; a gradient is not finite. Each time it is started
again by the same command, or by what the error advises. Every loss that was logged is compared, bit for bit, with those of
a run that nobody disturbed. Printed: faults, resumes, mismatches, orphans (processes that a job left behind), files (that
were lost, damaged or left over), untold (ends that no line explains).

Jobs are forked from a process that has imported everything. The moments are random, the seed repeats the choices alone.
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
FAULTS = (*KILLS, "cut", "flip", "disk", "nan")
SECONDS = 120  # after which a process that was to do something is taken to hang
SHOWN = ("faults", "resumes", "mismatches", "orphans", "files", "untold")
OF_A_JOB = 50  # faults, after which its losses are compared
GRACE = 10  # seconds in which processes whose launcher is gone have to end


class Life:
    """A start of the job, forked from this process, with all that it starts."""

    def __init__(self, folder: Path, options: tuple[str, ...], prepare: Callable[[], None] | None):
        self.said_path = folder / "said"
        with self.said_path.open("wb") as said:
            self.pid = os.fork()
            if self.pid == 0:
                self._run(folder, options, prepare, said.fileno())
        self.status: int | None = None
        self.orphans = 0
        self.left: list[str] = []
        """Their names."""

    def _run(
        self, folder: Path, options: tuple[str, ...], prepare: Callable[[], None] | None, said: int
    ) -> None:
        status = 70
        try:
            os.setsid()
            os.dup2(said, 1)
            os.dup2(said, 2)
            os.chdir(folder)
            if prepare is not None:
                prepare()
            from titanplans.training.launch.main import main

            status = main(["job.toml", *options])
        except BaseException:  # noqa: BLE001  a process of its own
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    @property
    def said(self) -> str:
        return self.said_path.read_text(errors="replace")

    def runs(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is None

    def wait_until(self, there: Callable[[], bool]) -> bool:
        """Wait until something is there; False if the job has ended before."""
        deadline = time.monotonic() + SECONDS
        while not there():
            if not self.runs():
                return False
            if time.monotonic() > deadline:
                raise AssertionError(f"it hangs:\n{self.said}")
            time.sleep(0.005)
        return True

    def ranks(self) -> list[int]:
        return children(self.pid)

    def end(self) -> int:
        """Wait until the launcher and the ranks have ended; what has not ended by itself is counted and killed."""
        self.wait_until(lambda: False)
        assert self.status is not None
        self.wait_for(_ranks_left)
        return self.status

    def wait_for(self, left_behind: Callable[[], list[int]]) -> None:
        deadline = time.monotonic() + GRACE
        while left := left_behind():
            if time.monotonic() > deadline:
                self.orphans += len(left)
                self.left += map(_name, left)
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                deadline += GRACE
            time.sleep(0.005)


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found += map(int, task.read_text().split())
    return found


def _left_behind() -> list[int]:
    """The children of this process: it adopts those whose parent has ended (PR_SET_CHILD_SUBREAPER)."""
    while (found := children(os.getpid())) and os.waitpid(-1, os.WNOHANG)[0]:
        pass
    return found


def _ranks_left() -> list[int]:
    """Of these all but loaders' workers, which end within five seconds, and write nothing."""
    return [pid for pid in _left_behind() if _name(pid) != "pt_data_worker"]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


class Survival:
    """One job and its faults."""

    def __init__(self, folder: Path, seed: int, parallel: str, small_disk: bool):
        self.folder, self.parallel, self.draw = folder, parallel, random.Random(seed)
        self.kinds = [kind for kind in FAULTS if kind != "disk" or small_disk]
        self.checkpoints = folder / "out" / "checkpoint"
        self.counts: Counter[str] = Counter()
        self.kind_counts: Counter[str] = Counter()
        self.losses: dict[int, set[float]] = {}
        self.seconds_to_start = 1.0
        self.goes_on_at = 1  # a step
        self.problems: list[str] = []
        write_job(folder)

    # Starting

    def start(self, *options: str, prepare: Callable[[], None] | None = None) -> Life:
        mode = f"--checkpoint.async_mode={self.draw.choice(['disabled', 'async'])}"
        return Life(self.folder, (*PARALLEL[self.parallel], mode, *options), prepare)

    def finish(self, life: Life) -> int:
        """Wait for the end of a start, and look at what it has left behind."""
        status = life.end()
        if life.orphans:
            self.problem("orphans", f"{life.orphans} processes were left: {life.left}", life)
        started = re.search(r"Training starts at step (\d+)", life.said)
        if started:
            self.counts["resumes"] += 1
            if int(started[1]) != self.goes_on_at:
                self.problem("files", f"it went on at step {started[1]}, not {self.goes_on_at}", life)
        self.look(life)
        return status

    def look(self, life: Life) -> None:
        """Collect the losses; check every checkpoint, and note where training has to go on."""
        from titanplans.training.checkpoint import folder
        from titanplans.training.checkpoint.manifest import damage
        from titanplans.training.trainer.jsonl import read_metrics

        # Of a start that has logged no step, the file is the one before's.
        for row in read_metrics(self.folder / "out" / "metrics.jsonl") if "  loss " in life.said else ():
            self.losses.setdefault(row["step"], set()).add(row["loss_metrics/global_avg_loss"])
        present = folder.steps(self.checkpoints)
        for step in present:
            if wrong := damage(folder.checkpoint_path(self.checkpoints, step)):
                self.problem("files", wrong, life)
        newest = max(present, default=0)
        if newest + 1 < self.goes_on_at:
            self.problem("files", f"step-{self.goes_on_at - 1} is lost", life)
        self.goes_on_at = newest + 1

    def problem(self, what: str, text: str, life: Life) -> None:
        self.counts[what] += 1
        self.problems.append(f"{what}: {text}\n    {life.said.strip()[-1500:]}")
        print(self.problems[-1], flush=True)

    # Faults

    def fault(self) -> None:
        kind = self.draw.choice(KILLS if self.draw.random() < 0.5 else self.kinds)
        self.counts["faults"] += 1
        self.kind_counts[kind] += 1
        print(f"{self.counts['faults']:5} {self.parallel:5} {kind:9} at step {self.goes_on_at}", flush=True)
        if kind in KILLS:
            self.kill(kind)
        elif kind in ("cut", "flip"):
            self.kill("all")
            self.damage(kind)
        elif kind == "disk":
            self.fill_the_disk()
        else:
            at = self.goes_on_at + self.draw.randrange(6)
            life = self.start("--metrics.log_freq=7", prepare=lambda: _poison(at))
            self.told(life, "not finite.*; (the newest complete checkpoint|there is no checkpoint)")

    def kill(self, kind: str) -> None:
        """Kill something while the job starts, trains or saves."""
        life, draw = self.start(), self.draw
        moment = draw.choice(["starts", "trains", "saves"])
        if moment == "starts" and kind != "worker":
            time.sleep(draw.uniform(0, self.seconds_to_start))
        else:
            begin = time.monotonic()
            if not life.wait_until(lambda: "  loss " in life.said):
                raise AssertionError(f"it did not start:\n{life.said}")
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
            self.problem("untold", f"{kind} was killed, and the exit status is 0", life)

    def damage(self, kind: str) -> None:
        """Break a file of the newest checkpoint, see it refused, and do what the error says."""
        from titanplans.training.checkpoint import folder

        present = folder.steps(self.checkpoints)
        if not present:
            return
        newest = folder.checkpoint_path(self.checkpoints, present[-1])
        path = self.draw.choice(sorted(path for path in newest.iterdir() if path.stat().st_size))
        content = bytearray(path.read_bytes())
        place = self.draw.randrange(len(content))
        if kind == "flip":
            content[place] ^= 1 << self.draw.randrange(8)
        path.write_bytes(content if kind == "flip" else content[:place])
        life = self.start()
        status, said = life.end(), life.said
        advised = re.search(
            r"remove (step-\d+), and the same command resumes from step-(\d+), the newest", said
        )
        one_line = said.count("error:") == 1 and "Traceback" not in said
        if status != 2 or not one_line or str(path.relative_to(self.folder)) not in said:
            self.problem("untold", f"{path.name} was {kind}, and the exit status is {status}", life)
        if advised:
            shutil.rmtree(self.checkpoints / advised[1])
            self.goes_on_at = int(advised[2]) + 1
        else:
            if "no other is intact" not in said or len(present) > 1:
                self.problem("untold", f"of {present} none is offered", life)
            shutil.rmtree(self.checkpoints)
            self.goes_on_at = 1

    def fill_the_disk(self) -> None:
        """Leave no room for a checkpoint, or nearly enough."""
        filler = self.folder / "out" / "filler"
        filler.parent.mkdir(exist_ok=True)
        size = max((_size(path) for path in self.checkpoints.glob("step-*")), default=800_000)
        room = self.draw.choice([self.draw.randrange(size), size - self.draw.randrange(size // 12)])
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(filler.parent).free - room))
        life = self.start()
        self.told(life, "no space is left|B free, but")
        filler.unlink()

    def told(self, life: Life, words: str) -> None:
        """The job ends by itself, with exit status 1 and one line, and leaves nothing half written."""
        status = self.finish(life)
        errors = [line for line in life.said.splitlines() if line.startswith("error: ")]
        if status != 1 or len(errors) != 1 or not re.search(words, errors[0]) or "Traceback" in life.said:
            self.problem("untold", f"the exit status is {status}", life)
        if left := [path.name for path in self.checkpoints.glob(".step-*.writing")]:
            self.problem("files", f"{left} were left over", life)

    # The end

    def compare(self) -> None:
        """Finish the job, run an undisturbed one, and compare."""
        steps = max(self.losses, default=0) + 4
        last = self.start(f"--training.steps={steps}")
        if self.finish(last) != 0:
            self.problem("untold", "the last start did not finish", last)
        ours = re.compile(r"step-\d+|titanplans\.lock")
        if left := [path.name for path in self.checkpoints.iterdir() if not ours.fullmatch(path.name)]:
            self.problem("files", f"{left} were left over", last)
        shutil.rmtree(self.folder / "out")
        disturbed, self.losses, self.goes_on_at = self.losses, {}, 1
        alone = self.start(f"--training.steps={steps}", "--checkpoint.no-enable")
        alone.end()
        alone.wait_for(_left_behind)
        if alone.orphans:
            self.problem("orphans", f"{alone.orphans} processes were left: {alone.left}", alone)
        self.look(alone)
        for step, losses in disturbed.items():
            if losses != self.losses.get(step):
                self.problem("mismatches", f"step {step}: {losses}, alone {self.losses.get(step)}", alone)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _poison(at: int) -> None:
    """Make the gradient of one rank not finite in step `at`, as a fault of its memory might."""
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
    for number in range(40):
        words = " ".join(f"the {i * number % 97} quick {i + number} foxes" for i in range(40))
        (folder / "text" / f"{number}.txt").write_text(words)


def _small_disk(path: Path, megabytes: int) -> bool:
    """Mount a small disk that this process and its children see; False where that is not allowed."""
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
    """Run in a process of its own, forked where everything is imported; leaves the counts in a file."""
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
    base = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be removed by a rank that ends in order
    (base / "tmp").mkdir()
    (base / "disk").mkdir()
    small = _small_disk(base / "disk", 12)
    os.environ["TMPDIR"] = tempfile.tempdir = f"{base}/tmp"
    try:
        jobs = max(2, -(-faults // OF_A_JOB))
        for number in range(jobs):
            parallel = list(PARALLEL)[number % 2]
            folder = base / "disk" / parallel
            folder.mkdir()
            survival = Survival(folder, seed + number, parallel, small)
            for _ in range(faults * (number + 1) // jobs - faults * number // jobs):
                survival.fault()
            survival.compare()
            counts += survival.counts
            kinds += survival.kind_counts
            shutil.rmtree(folder)
            print(_words(counts, begin), flush=True)
    finally:
        if small:
            ctypes.CDLL(None).umount2(os.fsencode(base / "disk"), 2)
        shutil.rmtree(base)
    print(f"seed {seed}: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}", flush=True)
    Path(results).write_text(json.dumps({name: counts[name] for name in SHOWN}))


def _words(counts: Counter[str], begin: float) -> str:
    seconds = time.monotonic() - begin
    return f"{'  '.join(f'{name} {counts[name]}' for name in SHOWN)}  in {seconds:.0f} s"


def run(faults: int, seed: int) -> dict[str, int]:
    """Return the counts of so many faults."""
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
    return int(any(counts[name] for name in ("mismatches", "orphans", "files", "untold")))


if __name__ == "__main__":
    from tests.support import survival  # so that the functions have a name that the forked process finds

    status = survival.main()
    sys.stdout.flush()
    os._exit(status)
