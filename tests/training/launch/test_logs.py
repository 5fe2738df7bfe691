"""Which log lines of libraries are shown, and what happens if stdout is closed."""

import logging

from tests.support.programs import run_python
from titanplans.training.launch.logs import _HIDDEN, _is_shown


def test_the_log_filter_keeps_progress():
    def shown(name, level, module="trainer", function="train"):
        record = logging.LogRecord(name, level, f"{module}.py", 0, "words", (), None, function)
        return _is_shown(record)

    assert shown("root", logging.INFO), "progress of torchtitan"
    assert shown("titanplans.training.trainer.step", logging.INFO)
    assert shown("datasets", logging.WARNING)
    assert not shown("datasets", logging.INFO)
    assert not shown("root", logging.INFO, "utils", "collect")
    assert not shown("torchao", logging.WARNING)
    for name in ("root", "datasets", "torchao", "titanplans.training.trainer.step"):
        assert shown(name, logging.ERROR, "utils", "collect")


def test_a_job_continues_if_its_log_is_closed():
    done = run_python(
        "-c",
        "import logging, os, sys; from titanplans.training.launch.logs import init_logging; init_logging(0);"
        "ours, theirs = os.pipe(); os.close(ours); os.dup2(theirs, 1);"
        "[logging.getLogger('titanplans').info('words') for _ in range(3)]",
    )
    assert (done.returncode, done.stderr) == (0, "stdout was closed: the job continues without its log\n")


def test_filtered_functions_exist_in_torchtitan():
    """The functions whose log lines are hidden exist. Otherwise the lines of a renamed function would be shown."""
    import inspect

    import torchtitan.distributed.utils
    import torchtitan.tools.utils

    modules = (torchtitan.distributed.utils, torchtitan.tools.utils)
    sources = {(module.__name__.rpartition(".")[2], module): inspect.getsource(module) for module in modules}
    for name, function in _HIDDEN:
        texts = [text for (file, _), text in sources.items() if file == name]
        assert any(f"def {function}(" in text for text in texts), (name, function)
