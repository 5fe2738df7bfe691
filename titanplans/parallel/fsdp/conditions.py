"""Shard a model by the caller's conditions, for models that are not decoders or need other FSDP units."""

from collections.abc import Callable, Mapping, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titanplans.config import FSDP2Config
from titanplans.errors import ParallelError
from titanplans.parallel.fsdp.dtypes import split_dtypes
from titanplans.parallel.fsdp.sharding import apply_units, check_mesh, check_unsharded, param_dtype
from titanplans.parallel.fsdp.units import FSDPUnit, has_forward, has_parameters, refuse_ties
from titanplans.split.decoder import find_decoder
from titanplans.text import class_name

Condition = Callable[[str, nn.Module], bool]


def shard_model(
    model: nn.Module,
    conditions: Sequence[Condition] | Mapping[str, Condition],
    mesh: DeviceMesh,
    config: FSDP2Config | None = None,
) -> list[FSDPUnit]:
    """Shard in place each module of `model` for which a condition holds, and the root module with all other parameters.

    FSDP units may be nested; an outer unit then has only the parameters that are in no inner unit. Modules without
    parameters are skipped. With fsdp_reshard_after_forward = "default" every unit is resharded after its forward, except
    the root and, if the model has a list of blocks, the last block.

    Args:
        model: any module, before its first forward, on meta or not.
        conditions: functions of a module's fully qualified name and the module; the keys of a mapping are their names in
            errors.
        mesh: as for `fsdp.shard`.
        config: the options, as for `fsdp.shard`; None: the defaults. Prefetch and towers are refused: they need the
            order of execution.

    Returns:
        The units: the root, then the others in the order of `named_modules`.

    Raises:
        ParallelError: there are no conditions; a condition holds for no module with parameters, or for a container that is
            never called; or an error of `fsdp.shard`. Raised before anything is sharded.
    """
    config = FSDP2Config() if config is None else config
    for option in ("fsdp_forward_prefetch", "fsdp_backward_prefetch", "fsdp_towers"):
        if getattr(config, option) != getattr(FSDP2Config(), option):
            raise config.error(option, "conditions do not define the order of execution: leave it out")
    check_unsharded(model)
    check_mesh(mesh, config)
    if not conditions:
        raise ParallelError("no conditions: give at least one, or shard a decoder's blocks with `shard`")
    named = dict(conditions) if isinstance(conditions, Mapping) else _named(conditions)
    matched: dict[str, list[str]] = {condition: [] for condition in named}
    for name, module in model.named_modules():
        if not name or not has_parameters(module):
            continue
        for condition, holds in named.items():
            if holds(name, module):
                matched[condition].append(name)
                if not has_forward(module):
                    raise ParallelError(
                        f"condition {condition} holds for {name}, a {class_name(module)}, which is never "
                        "called: let it hold for its children"
                    )
    if missing := [condition for condition, names in matched.items() if not names]:
        raise ParallelError(
            f"condition {', '.join(missing)} holds for no module with parameters of {class_name(model)}: correct "
            "it, or leave it out"
        )
    chosen = {name for names in matched.values() for name in names}
    blocks = find_decoder(model, required=False).names
    units = [FSDPUnit(("",), "root")]
    units += [
        FSDPUnit((name,), "condition", last=name in blocks[-1:])
        for name, _ in model.named_modules()
        if name in chosen
    ]
    refuse_ties(model, units)
    units = split_dtypes(model, units, param_dtype(config))
    apply_units(model, units, mesh, config)
    return units


def _named(conditions: Sequence[Condition]) -> dict[str, Condition]:
    names = [getattr(condition, "__name__", type(condition).__name__) for condition in conditions]
    return {
        name if names.count(name) == 1 and name != "<lambda>" else f"{i} ({name})": condition
        for i, (name, condition) in enumerate(zip(names, conditions, strict=True), start=1)
    }
