"""Check before a run that schedule, configuration and machine fit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace

from slipstream.runtime.checkpoints.checkpoint import Checkpoint
from slipstream.runtime.computing.forms import find_forms
from slipstream.runtime.computing.trial import require_repeatable_layers, try_layers
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.coordinator.decisions.run_state import RunFacts
from slipstream.runtime.coordinator.records.metrics import IterationWork
from slipstream.runtime.coordinator.run_options import Resilience, RunOptions
from slipstream.runtime.data.data import batch_form, is_users_own, load_data, load_validation_data
from slipstream.runtime.data.dealt_samples import (
    check_costs,
    digest_data,
    find_cost_function,
    layers_of_stages,
)
from slipstream.runtime.data.sample_digests import check_first_samples
from slipstream.runtime.device import choose_device, choose_transport, gpu_count
from slipstream.runtime.failure_domains import divide_workers_by_node, find_domains
from slipstream.runtime.models.flops import counting_flops
from slipstream.runtime.models.identity import build_run_identity
from slipstream.runtime.models.layered_model import LayeredModel, build_model, parameter_dtype
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.placement import Placement, PlacementError, place_layers
from slipstream.runtime.processes.launch_environment import GpuShare, compute_gpu_share
from slipstream.runtime.protocol.form_codec import encode_form
from slipstream.runtime.protocol.setup import CommonSettings
from slipstream.runtime.ranks.worker_group import simulating_rank
from slipstream.runtime.replay.microbatch import NOTHING_READ, SamplesRead
from slipstream.runtime.run_identity import list_differences
from slipstream.runtime.state.held_layers import count_trained_elements
from slipstream.runtime.state.parameter_groups import require_all_patterns_match
from slipstream.runtime.state.undoable_steps import optimizer_factory
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule

MAX_DIFFERENCES = 8
"""Largest number of differences that a line for users names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """Values that follow from a schedule, configuration and machine that fit each other."""

    common: CommonSettings
    """Settings that all processes of the run get."""
    facts: RunFacts
    model: LayeredModel
    gpus: GpuShare
    """GPUs of the workers of node 0."""
    work: IterationWork
    """Tokens and floating-point operations of an iteration."""

    @property
    def placement(self) -> Placement:
        """Mapping between the schedules' stages, their columns, and the layers of the model."""
        return Placement(self.common.cuts)


def count_samples_read(
    resume: Checkpoint | None, config: RunConfig, microbatches: Sequence[int]
) -> SamplesRead:
    """Return the iteration from which this run counts samples, and the samples read before.

    The result is the iteration of the checkpoint `resume` and its number of samples. It is
    `NOTHING_READ` without `resume`, for a checkpoint of an earlier version, which does not store
    samples, and if this run would have read equally many samples by that iteration. `microbatches`
    has this run's number of micro-batches for each pipeline.
    """
    if resume is None or resume.manifest.samples is None:
        return NOTHING_READ
    samples_here = resume.iteration * config.training.batch * sum(microbatches)
    if resume.manifest.samples == samples_here:
        return NOTHING_READ
    return SamplesRead(resume.iteration, resume.manifest.samples)


def compare_with_checkpoint(resume: Checkpoint, fit: RunFit, config: RunConfig) -> str | None:
    """Return a line on how this run differs from the one that wrote `resume`.

    Returns None if at most the number of iterations differs, or if the checkpoint is of an earlier
    version. Raises ConfigError if the grids differ and the user's own data begin with other samples
    than they did: the samples of such data depend on the grid.
    """
    written_by = resume.manifest.run
    if written_by is None:
        return None
    # Compare what counts: this run may be longer than the one before.
    ours = fit.facts.identity
    iterations = ours.training["iterations"]
    theirs = replace(written_by, training={**written_by.training, "iterations": iterations})
    if ours.libraries.get("slipstream") != theirs.libraries.get("slipstream"):
        # Another version has other keys.
        theirs = replace(
            theirs, model=ours.model | theirs.model, training=ours.training | theirs.training
        )
    differences = list_differences(ours, theirs, there="in its run")
    if not differences:
        return None
    # Nearly all may differ, such as the learning rate, but not the samples by another grid.
    changed = [
        name
        for name, digest in fit.common.first_samples.items()
        if written_by.data.get(name, digest) != digest
    ]
    grids = [clause for clause in differences if clause.startswith("grid.")]
    if changed and grids and is_users_own(config.training):
        raise ConfigError(
            f"{resume.path}: training.data is {config.training.data!r}, and its {changed[0]} are "
            f"not those of the run that wrote the checkpoint, since {grids[-1]}; resume with the "
            "same micro-batches, or name samples by their number in the iteration"
        )
    listed, left = differences[:MAX_DIFFERENCES], len(differences) - MAX_DIFFERENCES
    more = f"; and {left} more" if left > 0 else ""
    return f"{resume.path}: resumes with differences: {'; '.join(listed)}{more}"


def check_fit(
    schedule: Schedule,
    config: RunConfig,
    options: RunOptions,
    read: SamplesRead = NOTHING_READ,
    resilience: Resilience = Resilience(),
) -> RunFit:
    """Check that schedule, configuration and machine fit; return what follows from them.

    Builds the model, and runs a user's layers on a sample; `options.notify` gets what is found.
    Raises PlacementError if the schedule is invalid, or it or the topology does not fit, and
    ConfigError if the configuration is at fault.

    Parameters
    ----------
    read
        Result of `count_samples_read`.
    """
    violations = check(schedule)
    if violations:
        raise PlacementError(f"the schedule breaks a rule: {violations[0]}")
    # The model: its layers, what each costs, and what passes between them.
    training = config.training
    device, ranks = choose_device(training.device), training.tensor_parallel
    with simulating_rank(ranks):
        model = build_model(
            config.model, training.seed, parameter_dtype(training), torch.device(device)
        )
        with counting_flops() as flops:
            layer_forms = find_forms(model, config)
        require_all_patterns_match(model, training)
        optimizer_factory(training)
        elements = count_trained_elements(model, training)
        require_repeatable_layers(model, config, [counts.total for counts in elements])
    placement = place_layers(schedule.grid, model.layers)
    # The data: the first samples must be what the model takes.
    corpus = load_data(config, schedule.grid.microbatches, read)
    data_form = batch_form(config)
    first_samples = check_first_samples(
        corpus, config, schedule.grid.microbatches, read.iteration, data_form
    )
    check_costs(corpus, schedule, training, placement)
    validation = load_validation_data(config, schedule.grid.microbatches)
    digests = digest_data(corpus, validation, training) | first_samples.digests
    # What the run trains, by which its workers and checkpoints are recognised.
    columns = tuple(
        tuple(sorted(placement.layers_in_column(schedule.grid, column)))
        for column in range(schedule.grid.columns)
    )
    identity = build_run_identity(
        config, data=digests, microbatches=schedule.grid.microbatches, columns=columns
    )
    # Try the layers on a sample, on this machine.
    fused = try_layers(
        config, first_samples.first, placement.cuts, flops.training_flops(1), options.notify
    )
    # Which worker runs where?
    shares = divide_workers_by_node(
        [seat.worker for seat in schedule.seats], options.nodes, options.topology
    )
    domains = find_domains(schedule.grid, shares, options.local.processes, options.topology)
    gpus = compute_gpu_share([len(share) * ranks for share in shares], 0, options.local)
    # Settings that all processes get.
    microbatches = schedule.grid.total_microbatches
    common = CommonSettings(
        iterations=training.iterations,
        traced=options.traced,
        nodes=options.nodes,
        device=device,
        transport=choose_transport(
            training.backend,
            device,
            gpus.processes,
            gpu_count(device),
            shared=training.share_devices,
        ),
        cuts=placement.cuts,
        columns=columns,
        forms=tuple(encode_form(layer_forms[cut]) for cut in placement.cuts),
        data=encode_form(data_form),
        failure_domains=domains.domains,
        microbatches=schedule.grid.microbatches,
        resilience=resilience.select_for_workers(),
        first_samples=first_samples.digests,
        fused_layers=tuple(sorted(fused)),
    )
    # Facts that only the coordinator needs. Holders of layers that share a parameter are tied.
    shared_layers = []
    for group in sharing_of(model).groups:
        shared_layers.append(frozenset(place.layer for place in group))
    facts = RunFacts(
        shares=shares,
        elements=elements,
        identity=identity,
        shared_layers=tuple(shared_layers),
        whole_schedules=training.evaluate_every is not None
        or find_cost_function(corpus, training, layers_of_stages(schedule.grid, placement))
        is not None,
    )
    # The work of an iteration, from which its metrics are computed.
    work = IterationWork(
        tokens=training.batch * config.model.context * microbatches,
        flops=flops.training_flops(microbatches),
        peak_flops=training.peak_flops or options.peak_flops,
    )
    return RunFit(common=common, facts=facts, model=model, gpus=gpus, work=work)
