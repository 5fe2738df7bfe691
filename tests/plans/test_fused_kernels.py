"""Kernels of mamba-ssm that contain a sum over all channels: a split mixer of transformers does not call them."""

import importlib
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests import zoo
from tests.support import process_groups
from titanplans import apply_plan

KERNELS = {
    "falcon_mamba": "mamba_inner_fn",
    "bamba": "mamba2_split_conv1d_scan_combined",
    "falcon_h1": "mamba2_split_conv1d_scan_combined",
    "granitemoehybrid": "mamba2_split_conv1d_scan_combined",
    "nemotron_h": "mamba2_split_conv1d_scan_combined",
}


def called(rank: int) -> dict[str, tuple[bool, bool]]:
    """Return for each model whether a training step of the unsplit and of the split model calls the kernel."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    results = {}
    for name, kernel in KERNELS.items():
        model = zoo.build(name, dtype=torch.float32).train()
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        calls = []
        with mock.patch.object(module, kernel, lambda *args, calls=calls, **kwargs: calls.append(1)):
            model(**zoo.inputs(name), use_cache=False)
            unsplit = bool(calls)
            calls.clear()
            apply_plan(model, mesh)
            model(**zoo.inputs(name), use_cache=False)
        results[name] = (unsplit, bool(calls))
    return results


@pytest.fixture(scope="module")
def results():
    return process_groups.run(called, ranks=2)


@pytest.mark.parametrize("name", KERNELS)
def test_only_the_unsplit_model_calls_it(results, name):
    assert results[name] == (True, False)
