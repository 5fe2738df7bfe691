"""What `titanplans verify` gives before its end, in processes of its own: on a terminal, in a file, when it is stopped."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from titanplans.cli.main import main

ROOT = Path(__file__).parents[2]
FEW = """
import sys
from titanplans.cli.main import run
from titanplans.cli.verify import subject
subject.every_model = lambda: ["llama", "olmo2", "qwen2"]
sys.exit(run())
"""


def stopped(folder: Path, words: list[str], until: str) -> tuple[int, str, str, str]:
    """Stop `words` by SIGINT when the file matches `until`; return status, stdout, the terminal (stderr) and the file."""
    written = folder / "so_far"
    master, slave = os.openpty()
    started = subprocess.Popen(
        [sys.executable, *words, f"--output={written}"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=slave,
        text=True,
        start_new_session=True,
    )
    os.close(slave)
    terminal = b""
    os.set_blocking(master, False)
    end, sent = time.monotonic() + 240, False
    while started.poll() is None:
        assert time.monotonic() < end, terminal
        if not sent and written.exists() and re.search(until, written.read_text()):
            os.killpg(started.pid, signal.SIGINT)  # as a terminal does
            sent = True
        try:
            terminal += os.read(master, 4096)
        except OSError as error:  # none yet, or, on Linux, EIO: the process has closed the terminal, and ends
            if error.errno not in (errno.EAGAIN, errno.EIO):
                raise
            time.sleep(0.02)
    assert sent
    assert started.stdout is not None
    return started.returncode, started.stdout.read(), terminal.decode(), written.read_text()


def test_a_row_comes_with_each_case_and_all_so_far_when_it_is_stopped(tmp_path):
    words = ["-m", "titanplans", "verify", "llama", "--tp=2", "--layers=1", "--vocab-size=64"]
    status, out, terminal, written = stopped(
        tmp_path, words, r"unfinished: ([3-9]|1\d) of "
    )  # rows may come together
    assert status == 128 + signal.SIGINT
    assert out.startswith("llama, flavor debug\n")
    assert "unfinished: " in out.splitlines()[-1]
    assert "all of them right" in out
    assert out.count("  right  ") >= 3
    assert written == out
    assert re.findall(r"(\d+) of 12  right  tp 2, loss \w+, sequence \w+; [A-D].*?; worst ", terminal)[
        :3
    ] == ["1", "2", "3"]


def test_stopped_before_the_first_case(tmp_path):
    status, out, _, written = stopped(tmp_path, ["-m", "titanplans", "verify", "llama", "--tp=2"], "^$")
    assert (status, out, written) == (128 + signal.SIGINT, "stopped before the first case\n", "")


def test_of_several_models_those_that_are_done(tmp_path):
    (tmp_path / "few.py").write_text(FEW)
    words = ["-m", "few", "verify", "--all", "--quick", "--tp=2", "--loss-parallel", "--sequence-parallel"]
    status, out, terminal, written = stopped(tmp_path, words, "proved: 2 cases")
    assert status == 128 + signal.SIGINT
    assert "unfinished: " in out.splitlines()[-1]
    assert " of 3 models, all of them proved; " in out.splitlines()[-1]
    assert written.endswith(out.splitlines()[-1] + "\n")
    assert "0 of 3 models; " in terminal


def test_the_file_has_what_is_printed(tmp_path, capsys):
    written = tmp_path / "proof.json"
    words = [
        "verify",
        "llama",
        "--tp=2",
        "--layers=1",
        "--vocab-size=64",
        "--quick",
        "--json",
        f"--output={written}",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["verdict"] == "proved"
    assert written.read_text() == out
