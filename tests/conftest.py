"""What holds for all tests: threads, signals, no clocks, the order of files."""

import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import torch

from titanplans.training.trainer.device import no_trainer

if no_trainer() is not None:  # as on torch 2.11, where everything else runs
    collect_ignore = [
        "training",
        "docs",
        "cli/test_sweep.py",
        "test_torchrun.py",
    ]
os.environ.pop("COLUMNS", None)  # a worker of pytest-xdist has it: tables are wrapped to fit it
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = [*globals().get("collect_ignore", []), "interpreted"]  # make test-kernels
# Tensors here are tiny, and ranks have processes of their own: a second thread only waits, on a core that is busy.
torch.set_num_threads(1)
# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP; a program that tests start would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # which a new program does not inherit
# A property is true or false; how long an example takes says something of the machine alone.
hypothesis.settings.register_profile("titanplans", deadline=None)
hypothesis.settings.load_profile("titanplans")

ROOT = Path(__file__).parents[1]
THOROUGH = {
    "tests/proof/test_mutants.py": (),
    "tests/proof/test_language_mutants.py": (),
    "tests/proof/test_mutants_bugs.py": (),
    "tests/proof/test_pipelines.py": (
        "test_every_architecture_is_proved_in_two_stages", "test_stages_train_as_the_whole_model_does",
        "test_a_pipeline_alone_is_proved_in_every_pair_of_conditions",
    ),
    "tests/proof/test_proof_holds.py": (),
    "tests/proof/test_proof_tolerance.py": ("test_in_16_bits_everything_has_to_be_finite",),
    "tests/parallel/test_combinations.py": (),
    "tests/parallel/test_fsdp.py": (),
    "tests/parallel/test_language_parallel.py": (),
    "tests/parallel/test_manager.py": (),
    "tests/parallel/test_parallelize.py": (),
    "tests/parallel/compile/test_compile.py": (),
    "tests/parallel/compile/test_compile_architectures.py": (),
    "tests/parallel/compile/test_overlap.py": (),
    "tests/parallel/mesh/test_process_group.py": ("test_ctrl_c_in_one_rank_ends_all",),
    "tests/parallel/optimizers/test_muon.py": ("test_sharded_matrices_are_updated_as_whole_ones",),
    "tests/precision/test_float8_parallel.py": (),
    "tests/precision/test_nf4.py": ("test_a_step_is_that_of_one_process",),
    "tests/adapters/test_adapters.py": ("test_a_step_is_that_of_one_process",),
    "tests/loss/test_fused_loss.py": ("test_it_is_that_of_the_logits_over_ranks",),
    "tests/observe/test_parallelism_report.py": (),
    "tests/observe/test_job_report.py": (),
    "tests/kernels/test_kernels_models.py": ("test_import_touches_nothing_and_other_devices_install_nothing",),
    "tests/weights/test_full_state_dict.py": (),
    "tests/weights/test_weights_save.py": (),
    "tests/training/test_trainer_strategies.py": (),
    "tests/training/test_pipeline_jobs.py": (
        "test_a_job_has_the_figures_of_one_process", "test_own_models_adapters_float8_and_muon_train_alike",
        "test_a_job_goes_on_with_other_degrees_and_its_weights_are_published",
    ),
    "tests/training/test_adapter_jobs.py": ("test_a_published_model_is_tuned_and_handed_on",),
    "tests/training/checkpoint/test_checkpoint_jobs.py": (),
    "tests/training/checkpoint/test_export.py": (),
    "tests/training/checkpoint/test_restarts.py": (),
    "tests/training/checkpoint/test_survival.py": (),
    "tests/training/data/test_data_loader.py": (
        "test_a_resumed_loader_goes_on_bit_for_bit", "test_a_resumed_pass_ends_where_the_first_would_have",
    ),
    "tests/training/launch/test_starts.py": (),
    "tests/training/launch/test_train_cli.py": (),
    "tests/cli/test_async_tp_command.py": (),
    "tests/cli/test_sweep.py": ("test_a_sweep_survives_a_failing_cell_and_goes_on",),
    "tests/cli/test_verify.py": (
        "test_several_models_are_proved_side_by_side", "test_a_row_comes_with_each_case_and_all_so_far_when_it_is_stopped",
        "test_stopped_before_the_first_case", "test_of_several_models_those_that_are_done",
        "test_the_file_has_what_is_printed",
    ),
    "tests/docs/test_docs.py": ("test_python_blocks_run", "test_the_way_from_a_folder_to_a_folder_works_as_it_stands"),
    "tests/docs/test_readme_commands.py": (),
    "tests/test_devices.py": ("test_a_step_stays_on_its_device_and_waits_for_nothing",),
    "tests/test_out_of_tree.py": (),
    "tests/test_package.py": ("test_a_plan_is_proved_from_a_folder_that_has_plans_models_and_training_of_its_own",),
    "tests/test_quiet.py": ("test_a_command_leaves_stderr_empty", "test_benchmarks_leave_stderr_empty"),
    "tests/test_gpu_day.py": ("test_a_part_runs_in_a_dry_run",),
}  # fmt: skip
"""What `make test` leaves to `make test-all`: files with the tests in them, or with none for all of them.

Of each room some tests stay: a proof of each kind of mixer, strict application, wrong plans that are found, a job over two
ranks, a checkpoint that is resumed, refusals, links, house rules. A new test is in `make test` until it stands here.
"""


@pytest.fixture(scope="session")
def cpu_kernels():
    """Install the PyTorch stand-ins for FLA's kernels. They stay installed: a test without them starts a process."""
    from titanplans import kernels

    kernels.install("cpu")


@pytest.hookimpl(tryfirst=True)  # before -m picks
def pytest_collection_modifyitems(items):
    """Mark the thorough tests, and take their files first, so that no worker is left with one at the end."""
    long = set()
    for item in items:
        file = str(item.path.relative_to(ROOT))
        names = THOROUGH.get(file)
        if file in THOROUGH and (not names or item.originalname in names or item.name in names):
            item.add_marker("thorough")
            long.add(file)
    items.sort(key=lambda item: str(item.path.relative_to(ROOT)) not in long)


def pytest_collection_finish():
    """Freeze imported objects: each garbage collection over them takes half a second, and tests cause hundreds."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


def pytest_unconfigure():
    """Unfreeze, so that nanobind's modules are freed: nanobind prints every function that leaks."""
    gc.unfreeze()
