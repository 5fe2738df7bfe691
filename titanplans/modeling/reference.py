"""`Reference`: initialise the unsplit model with its own code, one unit at a time, so that memory is bounded.

A unit is a decoder layer, or a single module outside of the layers (embedding, norm, head). Each layer is constructed when
its values are needed, with the arguments that the model's constructor passed to it; then the model's `_init_weights` runs
on it. Outside of the layers, a parameter that a constructor has initialised keeps its value, and an uninitialised
parameter stays on meta until its unit is initialised. Uninitialised memory is filled with NaN, so that parameters that no
code initialises are found.
"""

import copy
import functools
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.utils.deterministic
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from titanplans.errors import ModelError
from titanplans.modeling.build import construct
from titanplans.modeling.user_model import is_user_model
from titanplans.split.decoder import join
from titanplans.torch_private.autograd import version
from titanplans.torch_private.swapped import swapped


class InitUnit(NamedTuple):
    """A module whose tensors are initialised together, and are in memory together."""

    path: str
    module: nn.Module
    owner: PreTrainedModel
    """The innermost PreTrainedModel around it, whose `_init_weights` transformers calls."""
    constructor: Callable[[], nn.Module] | None
    """The constructor of a layer, with its arguments. None: the unit is only the direct parameters of the module."""


class Reference:
    """The unsplit model of `model.config`; `units` and `values` return its initial values one unit at a time.

    Args:
        model: the model to initialise; only its config and its classes are used.
        device: the device on which values are drawn.
        seed: the seed of the values, which otherwise depend only on the config and the type of device.
        buffers_of: if given, only the buffers of these modules of `model` get values, and no parameter is allocated.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        seed: int,
        buffers_of: Collection[nn.Module] | None = None,
    ):
        self.device, self.seed = device, seed
        self._buffers_only = buffers_of is not None
        if buffers_of is None:
            names = set(model._no_split_modules or ())
            kinds = {cls for m in model.modules() for cls in type(m).__mro__ if cls.__name__ in names}
        else:
            kinds = {
                cls for module in buffers_of for cls in type(module).__mro__ if issubclass(cls, nn.Module)
            }
            kinds -= {nn.Module}
            device = torch.device("meta")
        self._calls: dict[nn.Module, Callable[[], nn.Module]] = {}
        with self._seeded("constructor"), _constructing(device), ExitStack() as stack:
            # Modules of user models may register a parameter before they initialise it, so it is not moved to meta.
            if not is_user_model(model.config):
                stack.enter_context(_to_meta(lambda parameter: bool(parameter.isnan().any())))
            # init_weights would mark modules as initialised (`_is_hf_initialized`), but only marks of constructors count.
            stack.enter_context(swapped(PreTrainedModel, "init_weights", lambda self: None))
            for kind in kinds:
                stack.enter_context(_recorded(kind, self._calls))
            self.model = construct(copy.deepcopy(model.config), device, torch.float32)
        self.tied: dict[str, str] = self.model.all_tied_weights_keys
        """The source of each tied parameter, by name."""

    def units(self) -> Iterator[InitUnit]:
        """Return all units, children before parents."""
        seen: set[nn.Module] = set()

        def walk(path: str, module: nn.Module, owner: PreTrainedModel) -> Iterator[InitUnit]:
            if module in seen:
                return
            seen.add(module)
            if isinstance(module, PreTrainedModel):
                owner = module
            if module in self._calls:
                yield InitUnit(path, module, owner, self._calls[module])
                return
            for name, child in module.named_children():
                yield from walk(join(path, name), child, owner)
            yield InitUnit(path, module, owner, None)

        return walk("", self.model, self.model)

    def values(self, unit: InitUnit) -> dict[str, torch.Tensor]:
        """Return a unit's full parameters (except tied ones) and buffers on the device, by full name.

        Raises:
            ModelError: neither a constructor nor `_init_weights` initialises a tensor, or `_init_weights` changes a
                parameter of another unit.
        """
        with self._seeded(unit.path):
            if unit.constructor is None:
                parameters_before = dict(unit.module._parameters)
                self._fill_with_nan(unit)
                members = {unit.path: unit.module}
            else:
                parameters_before = {}
                with ExitStack() as stack:
                    stack.enter_context(_constructing(self.device, fill=not self._buffers_only))
                    if self._buffers_only:
                        stack.enter_context(_to_meta(lambda parameter: True))
                    layer = unit.constructor()
                self._add_later_buffers(layer, unit)
                members = dict(reversed(list(layer.named_modules(prefix=unit.path))))  # children first
            try:
                self._run_init_weights(unit, members)
                return self._checked(unit, members)
            finally:
                # Afterwards only the returned dict keeps the values in memory.
                unit.module._parameters.update(parameters_before)

    def _fill_with_nan(self, unit: InitUnit) -> None:
        for name, parameter in unit.module._parameters.items():
            if parameter is not None and parameter.is_meta and join(unit.path, name) not in self.tied:
                full = torch.full_like(parameter, torch.nan, device=self.device)
                unit.module._parameters[name] = _like(parameter, full)

    def _add_later_buffers(self, layer: nn.Module, unit: InitUnit) -> None:
        """Add to `layer` the buffers that the model registered in the unit after the layer's constructor.

        If the model was constructed on meta, the `_init_weights` of the model around the unit sets the values of these
        buffers.
        """
        were_on_meta = False
        for path, module in unit.module.named_modules():
            buffers = layer.get_submodule(path)._buffers
            for name, value in list(module._buffers.items()):
                if name in buffers:
                    continue
                if value is not None and value.is_meta:
                    were_on_meta = True
                    module._buffers[name] = value = torch.full_like(value, torch.nan, device=self.device)
                buffers[name] = value
        if were_on_meta:
            with torch.no_grad(), guard_torch_init_functions():
                unit.owner._init_weights(unit.owner)

    def _run_init_weights(self, unit: InitUnit, members: dict[str, nn.Module]) -> None:
        """Do what `PreTrainedModel.initialize_weights` does, for the modules of one unit."""
        unit_ids = {id(p) for module in members.values() for p in module._parameters.values()}
        others = {name: p for name, p in self.model.named_parameters() if id(p) not in unit_ids}
        versions = {name: version(p) for name, p in others.items()}
        with torch.no_grad(), guard_torch_init_functions():
            for module in members.values():
                unit.owner._initialize_weights(module, unit.owner.is_custom_code())
        for name, parameter in others.items():
            if version(parameter) != versions[name]:
                raise ModelError(
                    f"{name} can't be initialised by itself: {_initializer(unit)} writes it together with "
                    f"{unit.path or 'the model'!r}"
                )

    def _checked(self, unit: InitUnit, members: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
        values = {}
        for path, module in members.items():
            for name, value in tensors(module).items():
                full_name = join(path, name)
                if full_name in self.tied or (self._buffers_only and value.is_meta):
                    continue
                if value.is_floating_point() and value.isnan().any():
                    raise ModelError(
                        f"{full_name} of model_type {self.model.config.model_type!r} would be left uninitialised: "
                        f"neither a constructor nor {_initializer(unit)} gives it a value"
                    )
                values[full_name] = value
        return values

    @contextmanager
    def _seeded(self, name: str) -> Iterator[None]:
        """Seed the random generators in the body, with the seed and `name`; restore their states afterwards."""
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            torch.manual_seed(int.from_bytes(digest[:8], "big"))
            yield


@contextmanager
def _constructing(device: torch.device, *, fill: bool = True) -> Iterator[None]:
    """Set the defaults float32 and `device` in the body, and fill uninitialised memory with NaN unless `fill` is False.

    torch fills uninitialised memory in its deterministic mode.
    """
    guard = torch.utils.deterministic
    dtype = torch.get_default_dtype()
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = guard.fill_uninitialized_memory  # pyrefly: ignore[missing-attribute]  # of the module's class
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(True, warn_only=True)
    guard.fill_uninitialized_memory = fill  # pyrefly: ignore[missing-attribute]
    try:
        with device:
            yield
    finally:
        guard.fill_uninitialized_memory = filled  # pyrefly: ignore[missing-attribute]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.set_default_dtype(dtype)


@contextmanager
def _recorded(layer: type[nn.Module], calls: dict[nn.Module, Callable[[], nn.Module]]) -> Iterator[None]:
    """Construct instances of `layer` on meta in the body, and store in `calls` how to construct each of them again."""
    original = layer.__init__

    @functools.wraps(original)
    def record(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            original(self, *args, **kwargs)
        if type(self) is layer:
            calls[self] = functools.partial(layer, *args, **kwargs)

    with swapped(layer, "__init__", record):
        yield


@contextmanager
def _to_meta(moves: Callable[[nn.Parameter], bool]) -> Iterator[None]:
    """Move a parameter to the meta device when a module registers it in the body, if `moves(parameter)`."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or not moves(parameter):
            return parameter
        return _like(parameter, parameter.detach().to("meta"))

    hook = register_module_parameter_registration_hook(move)  # pyrefly: ignore[bad-argument-type]  # torch says None
    try:
        yield
    finally:
        hook.remove()


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the direct parameters and buffers of a module, by name.

    They are read from the module's dicts, since attributes of a split module are local tensors.
    """
    return {n: t for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}


def _like(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """Return a parameter of `value` with the attributes that were set on `parameter`, such as `_no_reinit`."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def _initializer(unit: InitUnit) -> str:
    return f"{type(unit.owner).__name__}._init_weights"
