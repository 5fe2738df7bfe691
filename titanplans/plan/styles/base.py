"""The base of styles: the layout of each parameter, the sizes that the degree has to suit, and the refusals."""

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from titanplans.errors import PlanError
from titanplans.plan.adapted import FACTORS, is_adapted, with_factors
from titanplans.plan.layout import Layout


class Style(ParallelStyle):
    """A declaration of how a module, or one parameter, belongs to ranks. A cut installs it (`titanplans.split`).

    `opens` and `closes` mark the borders of a region, `inside` a style that is right only within one, `splits` one that
    gives each rank its part of the work; strict application checks that they match.
    """

    opens = closes = inside = splits = False
    gathers = False
    """Behind it every rank has the whole sequence."""
    shares_heads = False
    """It lets ranks share key/value heads where there are too few."""
    remedy = ""
    """What to write where a module with this style does not run."""

    def layout(self, name: str, param: nn.Parameter) -> Layout | None:
        """Return the layout of the parameter `name` of a module; None if this style has none for it."""
        return None

    def layouts(self, module: nn.Module) -> Mapping[str, Layout]:
        """Return the layout of each parameter that `module` itself holds."""
        found = {name: self.layout(name, param) for name, param in held(module).items()}
        return with_factors(module, {name: layout for name, layout in found.items() if layout is not None})

    def sizes(self) -> Mapping[str, tuple[int, bool]]:
        """Return numbers that the degree has to suit, by name, other than the shards' sizes; and whether ranks may share."""
        return {}

    def refusal(self, module: nn.Module) -> str | None:
        """Return why this style would be wrong on `module`, and what would work; None if it is right."""
        return None

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        """Return why this style would be wrong for the parameter `name` alone; None if it is right."""
        return "it works on a module's input and output: give it to the module that holds the parameter"

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        raise PlanError(
            f"{type(self).__name__} declares a cut and installs none: give it to titanplans.apply_plan, not to torch's "
            "parallelize_module"
        )

    def __repr__(self) -> str:
        options = ", ".join(f"{k}={v}" for k, v in vars(self).items())
        return f"{type(self).__name__}({options})"


class ParameterStyle(Style):
    """A style that only lays parameters out, so that a key may name one parameter."""

    def parameter_refusal(self, name: str, param: nn.Parameter) -> str | None:
        return None


def held(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that `module` itself holds, by name, without an adapter's, which follow from the weight."""
    own = {name: param for name, param in module._parameters.items() if param is not None}
    return {n: p for n, p in own.items() if n not in FACTORS} if is_adapted(module) else own


def own_styles(plan: Mapping[str, ParallelStyle]) -> dict[str, Style]:
    """Return the styles of `plan` that are this project's; a foreign one declares nothing."""
    return {key: style for key, style in plan.items() if isinstance(style, Style)}
