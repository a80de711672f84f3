"""Parameter groups: which options of the optimizer each parameter has."""

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from slipstream.runtime.config import ConfigError, ParameterGroup, TrainingConfig
from slipstream.runtime.model.layers.layered_model import LayeredModel
from slipstream.runtime.model.layers.sharing import sharing_of
from slipstream.runtime.model.layers.step_rules import StepRule, step_rules

Groups = list[dict[str, Any]]
"""Parameter groups as torch.optim takes them."""
_OPTIONS = {"learning_rate": "lr", "weight_decay": "weight_decay", "betas": "betas", "epsilon": "eps",
            "momentum": "momentum"}
"""Our names of options, and torch's."""
NO_RULES: Mapping[str, StepRule] = {}


def grouped(parameters: Mapping[str, nn.Parameter], config: TrainingConfig, last: int | None,
            rules: Mapping[str, StepRule] = NO_RULES) -> Groups:
    """Parameters, by `LAYER.NAME`, in groups: matrices and vectors of no pattern, those of each pattern, then each that
    one of the rules steps.

    A group names only what differs from the optimizer's defaults, and its weight decay. Where no pattern says
    otherwise, matrices decay and vectors (norms, biases) do not. With Muon, it says whether Muon steps it; `last` is
    the model's last layer.
    """
    found: dict[tuple[int, bool, bool], list[nn.Parameter]] = {
        (number, matrix, muon): [] for number in range(-1, len(config.parameter_groups)) for matrix in (True, False)
        for muon in (False, True)}
    for name, parameter in parameters.items():
        if name in rules:
            continue
        number = _group_of(name, config.parameter_groups)
        found[number, parameter.dim() >= 2, is_stepped_by_muon(name, parameter, config, last)].append(parameter)
    return [{"params": members, "weight_decay": config.weight_decay if matrix else 0.0,
             **(_muon_options(config) if muon else {}), **_options(number, config)}
            for (number, matrix, muon), members in found.items() if members or (number < 0 and not muon)] + [
        {"params": [parameters[name]], "rule": rule} for name, rule in rules.items() if name in parameters]


def is_stepped_by_muon(name: str, parameter: nn.Parameter, config: TrainingConfig, last: int | None) -> bool:
    """Whether Muon steps a parameter, by its `LAYER.NAME`: where nothing else is said, a matrix, or a stack of them (no
    kernels of a convolution by channel, which are vectors), of any layer but the first and the last, which hold
    embeddings and heads. Raises ConfigError for a vector."""
    if config.optimizer != "muon":
        return False
    number = _group_of(name, config.parameter_groups)
    asked = config.parameter_groups[number].optimizer if number >= 0 else None
    if asked == "muon" and parameter.dim() not in (2, 3):
        raise ConfigError(f"training.parameter_groups[{number}].optimizer is 'muon', and {name} has "
                          f"{parameter.dim()} dimensions; expected matrices, or stacks of them")
    hidden = int(name.partition(".")[0]) not in (0, last)
    matrices = parameter.dim() == 2 or (parameter.dim() == 3 and min(parameter.shape[1:]) > 1)
    return asked == "muon" or (asked is None and hidden and matrices)


def require_matches(model: LayeredModel, config: TrainingConfig) -> None:
    """Raises ConfigError where a pattern matches no parameter of the model, or only those of groups before it."""
    if not config.parameter_groups:
        return
    names = list(_names(model))
    used = {_group_of(name, config.parameter_groups) for name in names}
    for number, group in enumerate(config.parameter_groups):
        if number not in used:
            taken = any(fnmatchcase(name, group.parameters) for name in names)
            near = difflib.get_close_matches(group.parameters, names, 1, cutoff=0.3) or names[:1]
            raise ConfigError(f"training.parameter_groups[{number}].parameters is {group.parameters!r}, which matches "
                              + ("only parameters of groups before it" if taken else
                                 f"no parameter; there is, for example, {near[0]!r}"))


def _names(model: LayeredModel) -> Iterable[str]:
    """Of all parameters that the optimizer steps; what layers share has the first of its names."""
    sharing = sharing_of(model)
    for layer in range(model.layers):
        with torch.device("meta"):
            module = model.build(layer)
        yield from (str(sharing.first(layer, name)) for name, parameter in module.named_parameters()
                    if parameter.requires_grad and name not in step_rules(module))


def rules_of(modules: Mapping[int, nn.Module]) -> dict[str, StepRule]:
    """Return the rules of some layers by `LAYER.NAME`."""
    return {f"{layer}.{name}": rule for layer, module in modules.items() for name, rule in step_rules(module).items()}


def _group_of(name: str, groups: Iterable[ParameterGroup]) -> int:
    """The number of the first group that matches; -1: none does."""
    return next((number for number, group in enumerate(groups) if fnmatchcase(name, group.parameters)), -1)


def _muon_options(config: TrainingConfig) -> dict[str, Any]:
    rate = {} if config.muon.learning_rate is None else {"lr": config.muon.learning_rate}
    return {"muon": True, "momentum": config.muon.momentum, **rate}


def _options(number: int, config: TrainingConfig) -> dict[str, Any]:
    if number < 0:
        return {}
    group = config.parameter_groups[number]
    return {torchs: getattr(group, ours) for ours, torchs in _OPTIONS.items() if getattr(group, ours) is not None}
