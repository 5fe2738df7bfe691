"""Megatron-FSDP: options reach the package under its names, and the need for CUDA is checked first.

If the package is installed, its signatures and its optimizer are tested, otherwise the error. Nothing is trained here,
because training would need two GPUs.
"""

import importlib.util
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.support import process_groups
from tests.support.refusals import refusal
from tests.support.tiny_model import Block, Tiny
from titanplans.config import ActivationCheckpoint, MegatronFSDPConfig
from titanplans.errors import PlanError
from titanplans.parallel.activation_checkpoint import apply_activation_checkpointing
from titanplans.parallel.megatron_fsdp import (
    accumulate,
    apply_megatron_fsdp,
    arguments,
    refuse_mesh,
    register_optimizer,
    unit_classes,
)

INSTALLED = importlib.util.find_spec("megatron_fsdp") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason="megatron-fsdp is an extra, and not installed")


@pytest.fixture(scope="module", autouse=True)
def world():
    """A fake group of eight ranks."""
    with process_groups.fake_group(8):
        yield


def mesh(*sizes, names=("dp_replicate", "dp_shard", "tp")):
    return DeviceMesh("cpu", torch.arange(8).view(sizes), mesh_dim_names=names)


def call(model=None, **options):
    library = importlib.import_module("megatron_fsdp")
    return arguments(library, model or Tiny(), mesh(1, 8, 1), MegatronFSDPConfig(**options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the error without CUDA")
def test_without_cuda_the_error_comes_first():
    """The mesh and the model are wrong too, but are checked later."""
    message = refusal(apply_megatron_fsdp, nn.Linear(2, 2), mesh(8, 1, 1), MegatronFSDPConfig())
    assert message.startswith("megatron_fsdp needs CUDA")


@pytest.mark.skipif(INSTALLED, reason="tests the error without the package")
def test_without_the_package_the_error_names_the_extra():
    message = refusal(apply_megatron_fsdp, Tiny(), mesh(1, 8, 1), MegatronFSDPConfig())
    assert "pip install 'titanplans[megatron-fsdp]'" in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DeviceMesh("cpu", torch.arange(1), mesh_dim_names=("dp_shard",)),
            "dp_shard = 1: over one rank it doubles",
        ),
        (lambda: mesh(2, 4, 1), "dp_replicate = 2"),
        (lambda: mesh(1, 4, 2), "tp = 2"),
    ],
)
def test_meshes_that_the_package_can_not_use_are_refused(make, message):
    assert message in refusal(refuse_mesh, make())


def test_a_mesh_that_is_accepted():
    refuse_mesh(mesh(1, 8, 1))


def test_fsdp_modules_are_the_blocks_or_the_classes_named():
    def units(*names):
        return unit_classes(Tiny(), MegatronFSDPConfig(fsdp_unit_modules=names or None))

    assert units() == [Block]
    assert set(units("Block", "Embedding")) == {Block, nn.Embedding}
    assert 'no module of the model is of class "Blok"; give one of Attention, Block' in refusal(units, "Blok")
    with pytest.raises(PlanError):
        unit_classes(nn.Linear(2, 2), MegatronFSDPConfig())


@needs_package
def test_options_reach_the_package_by_its_own_names():
    from megatron_fsdp import fully_shard_model

    arguments = call(
        zero_dp_strategy=1,
        fsdp_unit_modules=["Embedding"],
        options={"overlap_grad_reduce": False, "main_grads_dtype": "float32", "main_params_dtype": "none"},
    )
    inspect.signature(fully_shard_model).bind(**arguments)
    policy = arguments["mixed_precision_policy"]
    assert (policy.main_grads_dtype, policy.main_params_dtype) == (torch.float32, None)
    assert (arguments["zero_dp_strategy"], arguments["fsdp_unit_modules"]) == (1, [nn.Embedding])
    assert arguments["overlap_grad_reduce"] is False
    assert arguments["calculate_per_token_loss"] is True  # not the package's default
    assert call(options={"calculate_per_token_loss": False})["calculate_per_token_loss"] is False


@needs_package
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation_checkpointing": True}, "options.activation_checkpointing = true: megatron-fsdp 0."),
        ({"tp_dim": "tp"}, 'options.tp_dim = "tp": megatron-fsdp 0.'),
        ({"sync_model_each_microbatch": False}, "has no such option"),
        ({"nccl_ub": "yes"}, 'options.nccl_ub = "yes": expected true or false'),
        ({"main_grads_dtype": "fp32"}, "expected a dtype such as float32"),
    ],
)
def test_options_that_the_package_lacks_are_refused(options, message):
    assert message in refusal(call, options=options)


@needs_package
def test_the_package_initializes_a_model_on_meta():
    with torch.device("meta"):
        meta = Tiny()
    assert call(meta)["init_model_with_meta_device"] is True
    assert call()["init_model_with_meta_device"] is False


def test_models_that_are_refused():
    recomputed, compiled = Tiny(), Tiny()
    apply_activation_checkpointing(recomputed, ActivationCheckpoint(mode="full"))
    compiled.layers[0].compile()
    for model in (recomputed, compiled):
        message = refusal(arguments, None, model, mesh(1, 8, 1), MegatronFSDPConfig())
        assert "layers.0 is split, recomputed" in message


class Managed:
    """A model with the methods that the package's optimizer calls; its parameters are plain tensors on the CPU."""

    model_auto_sync = True

    def install_optimized_model_weights(self): ...

    def zero_grad_buffer(self): ...


def optimizer():
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4))
    vector = nn.Parameter(torch.randn(4))
    for parameter in (weight, vector):
        parameter._megatron_fsdp_model = Managed()
    groups = [{"params": [weight], "lr": 0.1}, {"params": [vector], "lr": 0.01, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1), weight, vector


def stepped(adam, *parameters):
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    adam.step()
    adam.zero_grad()
    return [parameter.detach().clone() for parameter in parameters]


@needs_package
def test_the_first_update_is_that_of_the_optimizer():
    from megatron_fsdp import fully_shard_optimizer

    adam, *parameters = optimizer()
    expected = stepped(adam, *parameters)

    adam, *parameters = optimizer()
    before = [parameter.detach().clone() for parameter in parameters]
    register_optimizer(adam)
    torch.testing.assert_close([p.detach() for p in parameters], before, rtol=0, atol=0)
    torch.testing.assert_close(stepped(adam, *parameters), expected, rtol=0, atol=0)
    assert [group["lr"] for group in adam.param_groups] == [0.1, 0.01]

    # This is why titanplans suppresses the package's first step. If this assertion fails, the package no longer takes it.
    adam, *parameters = optimizer()
    fully_shard_optimizer(adam)
    assert not torch.allclose(stepped(adam, *parameters)[0], expected[0], rtol=1e-3)


@needs_package
def test_an_optimizer_of_other_parameters_is_refused_and_still_steps():
    plain = nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([plain], lr=1.0)
    assert "SGD holds parameters" in refusal(register_optimizer, sgd)
    stepped(sgd, plain)
    assert plain.tolist() == [0.5, 0.5]


@needs_package
def test_only_the_last_micro_batch_reduces():
    from megatron_fsdp import MegatronFSDP

    model = MegatronFSDP.__new__(MegatronFSDP)  # its __init__ needs CUDA
    nn.Module.__init__(model)
    model.data_parallel_sharding_strategy, model.dist_index = "optim", SimpleNamespace(use_hybrid_fsdp=False)
    syncs = []
    for last in (False, True):
        with accumulate(model, last=last):
            syncs.append(model.model_auto_sync)
        assert model.model_auto_sync
    assert syncs == [False, True]
