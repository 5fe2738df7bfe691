"""A split step on a simulated accelerator: a tensor on the wrong device, or a synchronisation with the device, raises.

Fake tensors on torch's device "PrivateUse1" represent tensors on a GPU, and torch's fake process group represents NCCL. An
operation fails if one of its tensors is on the device and another was created on the CPU in this step. Reading a value of a
tensor fails, too.
Stand-ins replace FLA's kernels, because Triton needs a GPU. So neither Triton kernels nor values are tested here.
"""

import contextlib
import importlib
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import backend_registration

from tests import zoo
from tests.support import process_groups
from titanplans import apply_plan
from titanplans.parallel import clip_gradients, cross_entropy
from titanplans.torch_private.distributed import fake_store

NUMBER, COPY = "aten._local_scalar_dense", "aten::empty_strided"
"""The operators that an error names. They read a tensor's value, or make a tensor from a Python list and copy it to the
device."""
OWN = {
    "cat": ("modeling_cat.py", NUMBER),
    "falcon": ("modeling_falcon.py", COPY),
    "gemma3": ("modeling_gemma3.py", NUMBER),
    "moba": ("attention_parts.py", NUMBER),
    "mom": ("mom.py", NUMBER),
}
"""Models whose own code (for moba the CPU stand-in) synchronises in each step, with the file and the operator."""
NAMES = (*zoo.ARCHITECTURES, *zoo.FAMILIES)


def steps(rank: int) -> dict[str, str]:
    """Return for each architecture the error of a step and the files in which it is raised; "" if there is no error."""
    # This process is used only here, so replaced functions need not be restored.
    backend_registration._setup_privateuseone_for_python_backend("gpu", backend_module=Accelerator())
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[misc]  entered by FLA's functions
    install = importlib.import_module("titanplans.kernels.install")
    install._first_is_on_cpu = lambda *_, **__: True
    dist.destroy_process_group()
    dist.init_process_group("cpu:fake,gpu:fake", rank=0, world_size=2, store=fake_store())
    mesh = init_device_mesh("gpu", (2,), mesh_dim_names=("tp",))
    errors = {}
    for name in NAMES:
        try:
            step(name, mesh)
            errors[name] = ""
        except Exception as error:  # noqa: BLE001  the test checks each error
            places = [
                frame.filename.rpartition("/")[2] for frame in traceback.extract_tb(error.__traceback__)
            ]
            errors[name] = f"{error} in {' '.join(dict.fromkeys(places))}"
    return errors


class Accelerator(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def step(name: str, mesh) -> None:
    model: Any = zoo.build(name, dtype=torch.bfloat16).train()
    with FakeTensorMode():
        move(model)
        apply_plan(model, mesh, loss_parallel=True)
        inputs = {key: like(value) for key, value in zoo.inputs(name).items()}
        logits = model(**inputs, use_cache=False).logits
        labels = like(torch.zeros(logits.shape[:-1], dtype=torch.long))
        cross_entropy(logits, labels, labels.numel()).backward()
        assert clip_gradients(model.parameters(), 1.0).device.type == "gpu"
        torch.optim.AdamW(one_of_each_kind(model), foreach=True).step()


def one_of_each_kind(model: nn.Module) -> list[nn.Parameter]:
    """Return one parameter of each kind: type, placements, dtype and dimensions of the parameter and of its gradient.

    An optimizer step with all parameters would take as long as the step of the model.
    """
    kinds: dict[Any, nn.Parameter] = {}
    for parameter in model.parameters():
        kinds.setdefault((kind(parameter), kind(parameter.grad)), parameter)
    return list(kinds.values())


def kind(tensor: torch.Tensor | None) -> Any:
    placements = getattr(tensor, "placements", None)
    return None if tensor is None else (type(tensor), placements, tensor.dtype, tensor.ndim)


def move(model: nn.Module) -> None:
    """Move parameters and buffers of `model` to the accelerator. Tied parameters stay tied."""
    moved: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    if value not in moved:
                        new = like(value)
                        is_parameter = isinstance(value, nn.Parameter)
                        moved[value] = nn.Parameter(new, value.requires_grad) if is_parameter else new
                    table[name] = moved[value]


def like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="gpu")


errors = process_groups.module_fixture(steps, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_a_step_stays_on_its_device_and_does_not_synchronise(errors, name):
    if name in OWN:
        file, operator = OWN[name]
        assert operator in errors[name]
        assert file in errors[name]
    else:
        assert errors[name] == ""
