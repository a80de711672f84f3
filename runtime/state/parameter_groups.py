"""Divide parameters into groups with the same options of the optimizer."""

import difflib
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from slipstream.runtime.config import ConfigError, ParameterGroup, TrainingConfig
from slipstream.runtime.models.layered_model import LayeredModel
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.models.step_rules import StepRule, step_rules

OptimizerGroups = list[dict[str, Any]]
"""Parameter groups as torch.optim takes them: each a dict with "params" and options."""
_OPTIONS = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "betas": "betas",
    "epsilon": "eps",
    "momentum": "momentum",
}
"""torch's names of options, by the job file's names."""
NO_RULES: Mapping[str, StepRule] = {}


def build_groups(
    parameters: Mapping[str, nn.Parameter],
    config: TrainingConfig,
    last: int | None,
    rules: Mapping[str, StepRule] = NO_RULES,
) -> OptimizerGroups:
    """Return torch's parameter groups, by patterns in `[training] parameter_groups`.

    Names of parameters are `LAYER.NAME`; `last` is the number of the model's last layer, None if
    unknown. Each pattern has a group of its matrices and one of its vectors, if there are any; two
    more, perhaps empty, have the parameters that no pattern matches. Parameters that Muon steps are
    in groups of their own, with the key "muon"; each parameter in `rules` has one with the key
    "rule". A group names its weight decay, and the other options that its pattern or Muon sets.
    Unless a pattern sets weight decay, matrices decay and vectors (norms, biases) do not. Raises
    ConfigError if a pattern assigns a vector to Muon.
    """
    # By number of the pattern (-1: none), whether a matrix, and whether Muon steps it.
    members_of: dict[tuple[int, bool, bool], list[nn.Parameter]] = {
        (number, matrix, muon): []
        for number in range(-1, len(config.parameter_groups))
        for matrix in (True, False)
        for muon in (False, True)
    }
    for name, parameter in parameters.items():
        if name in rules:
            continue
        number = _group_of(name, config.parameter_groups)
        muon = is_stepped_by_muon(name, parameter, config, last)
        members_of[number, parameter.dim() >= 2, muon].append(parameter)

    groups: OptimizerGroups = []
    for (number, matrix, muon), members in members_of.items():
        # The groups that no pattern matches exist even without members: torch requires one.
        if not members and (number >= 0 or muon):
            continue
        group = {"params": members, "weight_decay": config.weight_decay if matrix else 0.0}
        if muon:
            group |= _muon_options(config)
        groups.append(group | _group_options(number, config))
    ruled = [name for name in rules if name in parameters]
    groups += [{"params": [parameters[name]], "rule": rules[name]} for name in ruled]
    return groups


def is_stepped_by_muon(
    name: str, parameter: nn.Parameter, config: TrainingConfig, last: int | None
) -> bool:
    """Return whether Muon steps the parameter whose name is `LAYER.NAME`.

    With the optimizer "muon", a parameter's pattern may say so. By default, Muon steps matrices and
    stacks of matrices of all layers but 0 and `last` (None: but 0), which hold embeddings and
    heads. Kernels of depthwise convolutions count as vectors. Raises ConfigError if a pattern
    assigns a vector to Muon.
    """
    if config.optimizer != "muon":
        return False
    number = _group_of(name, config.parameter_groups)
    assigned = config.parameter_groups[number].optimizer if number >= 0 else None
    if assigned == "muon" and parameter.dim() not in (2, 3):
        raise ConfigError(
            f"training.parameter_groups[{number}].optimizer is 'muon', and {name} has "
            f"{parameter.dim()} dimensions; expected matrices, or stacks of them"
        )
    is_hidden = int(name.partition(".")[0]) not in (0, last)
    has_matrices = parameter.dim() == 2 or (parameter.dim() == 3 and min(parameter.shape[1:]) > 1)
    return assigned == "muon" or (assigned is None and is_hidden and has_matrices)


def require_all_patterns_match(model: LayeredModel, config: TrainingConfig) -> None:
    """Raise ConfigError if a pattern of `[training] parameter_groups` selects no parameter."""
    # A parameter belongs to the first pattern that matches it.
    if not config.parameter_groups:
        return
    names = list(_stepped_names(model))
    used = {_group_of(name, config.parameter_groups) for name in names}
    for number, group in enumerate(config.parameter_groups):
        if number in used:
            continue
        if any(fnmatchcase(name, group.parameters) for name in names):
            matches = "only parameters of groups before it"
        else:
            # A pattern without matches is often a misspelt name.
            near = difflib.get_close_matches(group.parameters, names, 1, cutoff=0.3) or names[:1]
            matches = f"no parameter; there is, for example, {near[0]!r}"
        raise ConfigError(
            f"training.parameter_groups[{number}].parameters is {group.parameters!r}, "
            f"which matches {matches}"
        )


def _stepped_names(model: LayeredModel) -> Iterable[str]:
    """Yield `LAYER.NAME` of each parameter that the optimizer steps; a shared one once."""
    sharing = sharing_of(model)
    for layer in range(model.layers):
        with torch.device("meta"):
            module = model.build(layer)
        yield from (
            str(sharing.first_of_group(layer, name))
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and name not in step_rules(module)
        )


def rules_of(modules: Mapping[int, nn.Module]) -> dict[str, StepRule]:
    """Return the step rules of some layers, by `LAYER.NAME` of the parameter."""
    return {
        f"{layer}.{name}": rule
        for layer, module in modules.items()
        for name, rule in step_rules(module).items()
    }


def _group_of(name: str, groups: Iterable[ParameterGroup]) -> int:
    """Return the number of the first group whose pattern matches a name; or -1."""
    return next(
        (number for number, group in enumerate(groups) if fnmatchcase(name, group.parameters)), -1
    )


def _muon_options(config: TrainingConfig) -> dict[str, Any]:
    rate = {} if config.muon.learning_rate is None else {"lr": config.muon.learning_rate}
    return {"muon": True, "momentum": config.muon.momentum, **rate}


def _group_options(number: int, config: TrainingConfig) -> dict[str, Any]:
    if number < 0:
        return {}
    group = config.parameter_groups[number]
    return {
        torchs: getattr(group, ours)
        for ours, torchs in _OPTIONS.items()
        if getattr(group, ours) is not None
    }
