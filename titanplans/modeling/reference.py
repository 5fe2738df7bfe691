"""The unsplit model, one unit at a time: what the model's own code would initialise, in bounded memory.

A unit is a decoder layer, or a single module outside of the layers (embedding, norm, head). Layers are
made by their own constructor when it is their turn, from the arguments the model's constructor gave
them; then the model's `_init_weights` runs on them, with the marks (`_is_hf_initialized`) that a
constructor may have set. Outside of the layers a parameter that its constructor wrote keeps its value,
and one that is still unwritten memory stays on the meta device until its turn.

Unwritten memory reads as NaN throughout, so that a parameter that nobody initialises is found.
How the values get into a split model is `titanplans.modeling.initialize`.
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
from titanplans.modeling.own import is_own
from titanplans.split.decoder import join
from titanplans.torch_private.autograd import version
from titanplans.torch_private.swapped import swapped


class InitUnit(NamedTuple):
    """A part of the reference that is initialised, and held in memory, by itself."""

    path: str
    module: nn.Module
    owner: PreTrainedModel
    """The innermost model around it, whose `_init_weights` is the one that counts."""
    make: Callable[[], nn.Module] | None
    """For a layer: its constructor with its arguments. None: the module initialises its own parameters only."""


class Reference:
    """The model that `model.config` describes, without weights; `units` and `values` give them part by part.

    Args:
        model: the model to be initialised. Only its config and its classes are read.
        device: where values are drawn.
        seed: the values depend on it, on the config and on the kind of device; on nothing else.
        buffers_of: if given, only the buffers of these modules of `model` get values, and nothing takes the memory of a
            parameter.
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
            if not is_own(
                model.config
            ):  # whose modules write their parameters after they have registered them
                stack.enter_context(_to_meta(lambda parameter: bool(parameter.isnan().any())))
            # Only the constructors' own marks are to be on the modules.
            stack.enter_context(swapped(PreTrainedModel, "init_weights", lambda self: None))
            for kind in kinds:
                stack.enter_context(_recorded(kind, self._calls))
            self.model = construct(copy.deepcopy(model.config), device, torch.float32)
        self.tied: dict[str, str] = self.model.all_tied_weights_keys
        """Tied parameter -> the parameter it is tied to."""

    def units(self) -> Iterator[InitUnit]:
        """All units, children before parents."""
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
        """Parameters and buffers of a unit by full name, in full, on the device; tied ones are left out.

        Raises:
            ModelError: a tensor that neither its constructor nor `_init_weights` gives a value, or an
                `_init_weights` that writes into another unit.
        """
        with self._seeded(unit.path):
            if unit.make is None:
                own = dict(unit.module._parameters)
                self._fill_with_nan(unit)
                members = {unit.path: unit.module}
            else:
                own = {}
                with ExitStack() as stack:
                    stack.enter_context(_constructing(self.device, fill=not self._buffers_only))
                    if self._buffers_only:
                        stack.enter_context(_to_meta(lambda parameter: True))
                    made = unit.make()
                _give_later_buffers(made, unit.module)
                members = dict(reversed(list(made.named_modules(prefix=unit.path))))  # children first
            try:
                self._run_init_weights(unit, members)
                return self._checked(unit, members)
            finally:
                unit.module._parameters.update(own)  # the values now live in the answer only

    def _fill_with_nan(self, unit: InitUnit) -> None:
        for name, parameter in unit.module._parameters.items():
            if parameter is not None and parameter.is_meta and join(unit.path, name) not in self.tied:
                full = torch.full_like(parameter, torch.nan, device=self.device)
                unit.module._parameters[name] = _like(parameter, full)

    def _run_init_weights(self, unit: InitUnit, members: dict[str, nn.Module]) -> None:
        """Do as `PreTrainedModel.initialize_weights`, on the modules of one unit."""
        own = {id(p) for module in members.values() for p in module._parameters.values()}
        others = {name: p for name, p in self.model.named_parameters() if id(p) not in own}
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
        """Random state that depends on the seed and `name` only; the state before is restored."""
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type):
            torch.manual_seed(int.from_bytes(digest[:8], "big"))
            yield


@contextmanager
def _constructing(device: torch.device, *, fill: bool = True) -> Iterator[None]:
    """For constructors: float32 on `device`, and memory that is not written yet reads as NaN, unless `fill` is False.

    The NaN are what torch offers against reading memory that nobody wrote: deterministic mode.
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


def _give_later_buffers(made: nn.Module, layer: nn.Module) -> None:
    """Give `made`, a layer made anew, the buffers that the model has registered in `layer` after its constructor."""
    for path, module in layer.named_modules():
        buffers = made.get_submodule(path)._buffers
        buffers.update({name: value for name, value in module._buffers.items() if name not in buffers})


@contextmanager
def _recorded(layer: type[nn.Module], calls: dict[nn.Module, Callable[[], nn.Module]]) -> Iterator[None]:
    """Instances of `layer` are made on meta, and how to make them again is noted in `calls`."""
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
    """A parameter for which `moves` is true moves to the meta device when its module gets it."""

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
    """Parameters and buffers that a module holds itself, from its tables.

    Not by attribute access, which a parallelised module may answer with a view of its shard.
    """
    return {n: t for n, t in [*module._parameters.items(), *module._buffers.items()] if t is not None}


def _like(parameter: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
    """A parameter of `value` with the marks that were put on `parameter`, such as `_no_reinit`."""
    new = nn.Parameter(value, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def _initializer(unit: InitUnit) -> str:
    return f"{type(unit.owner).__name__}._init_weights"
