"""Apply each event to the state of a run, and find which effects it has.

The event loop calls `apply_event` with each event in turn; the result depends only on the state,
the event and its time. An order to train ends when a member is lost or reports an error, when
results are wrong or nothing is committed for long, or before an iteration that was chosen for all
members to stop at. When all remaining members have paused and a schedule for them is available, the
next order is given (`next_order`). It begins at the first iteration that is not committed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import next_order, orders
from slipstream.runtime.coordinator.decisions.commit_log import (
    CommitLog,
    CommitLogError,
    CommittedIteration,
)
from slipstream.runtime.coordinator.decisions.comparisons import (
    CopyDifference,
    SampleDifference,
    find_difference,
)
from slipstream.runtime.coordinator.decisions.effects import GiveUpWorker, ScheduleAnswer
from slipstream.runtime.coordinator.decisions.failover import RejoiningPhase
from slipstream.runtime.coordinator.decisions.orders import record_losses, record_node_losses
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.rebalancing import MAX_FETCH_FAILURES
from slipstream.runtime.coordinator.decisions.recoveries import NO_EMPTY_ORDERS
from slipstream.runtime.coordinator.decisions.run_state import (
    ConnectedWorker,
    FinishingPhase,
    GatheringPhase,
    RunRules,
    RunState,
    TrainingPhase,
    TransitionBuilder,
    WorkerLoss,
)
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedAnswer
from slipstream.runtime.errors import OtherRunError, RunError
from slipstream.runtime.events import CoordinatorRestarted, Noted, Resumed
from slipstream.runtime.protocol.to_coordinator import (
    CheckpointSaved,
    FetchFailed,
    FetchUpToDate,
    Finished,
    IterationReport,
    Leaving,
    Paused,
    Published,
    ReadableCheckpoints,
    Ready,
    StepValidated,
    ToCoordinator,
    TrainingStarted,
)
from slipstream.runtime.protocol.to_worker import Acknowledged, Leave, Publish
from slipstream.runtime.run_identity import describe_difference
from slipstream.schedules.schedule import Worker

MAX_EMPTY_ORDERS = 2
"""Orders in a row that may end without any op or commit before pauses begin."""
FIRST_RETRY_SECONDS = 0.5
"""First pause after too many empty orders; each further one is twice as long."""
MAX_RETRY_SECONDS = 30.0
"""Longest pause after too many empty orders."""


class WorkerLost(NamedTuple):
    """Event: a worker is lost."""

    worker: Worker
    reason: str
    since: float
    """Time of `time.monotonic` since which the worker did not respond."""


class ReportsReceived(NamedTuple):
    """Event: a node agent has forwarded reports of workers that have stepped an iteration."""

    reports: tuple[IterationReport, ...]


class WorkerDisconnected(NamedTuple):
    """Event: the connection to a worker's process has closed; its loss should follow."""

    worker: Worker


class StopRequested(NamedTuple):
    """Event: the run was told to end at the next iteration boundary, with a checkpoint."""


class AbortIteration(NamedTuple):
    """Event: a run that was told to end stops now, within an iteration."""


class StallFound(NamedTuple):
    """Event: nothing has been committed for long, because these members wait for each other."""

    workers: tuple[Worker, ...]
    reason: str


class TimePassed(NamedTuple):
    """Event: some time has passed, so that timeouts may have expired."""


_MINOR_EVENTS = IterationReport, ReportsReceived, StepValidated, TrainingStarted, CheckpointSaved
"""Events after which nothing has to be decided unless they commit an iteration."""
TransitionEvent = (
    ToCoordinator
    | ReportsReceived
    | ScheduleAnswer
    | SpeedAnswer
    | WorkerLost
    | WorkerDisconnected
    | StopRequested
    | AbortIteration
    | StallFound
    | TimePassed
)


def apply_event(
    rules: RunRules, state: RunState, event: TransitionEvent, at: float
) -> tuple[RunState, list[Any]]:
    """Return the state after an event at time `at` (`time.monotonic`), and its effects in order.

    Raises RunError if the run cannot continue, CommitLogError if workers' inputs or results
    differ, or a loss is never finite, and PlannerFailedError if the planner itself failed. After
    a failover, raises OtherRunError if a worker that is found is of another run, and
    NoLiveWorkerError if none can be found.
    """
    step = TransitionBuilder(rules, state, at)
    _handle_event(step, event)
    if not _has_no_decision(state, step.state, event):
        _decide_next(step)
    return step.state, step.effects


def find_awaited_workers(state: RunState) -> list[Worker]:
    """Return the workers for which the first order, or a new coordinator, still waits."""
    if isinstance(state.phase, RejoiningPhase):
        return sorted(state.phase.missing_members)
    if isinstance(state.phase, GatheringPhase):
        return sorted(state.members.difference(state.live))
    return []


def find_needed_layers(rules: RunRules, state: RunState) -> Mapping[Worker, frozenset[int]]:
    """Return the layers that each member needs to train or finish; empty in other phases."""
    return (
        state.find_held_layers(rules.placement)
        if isinstance(state.phase, TrainingPhase | FinishingPhase)
        else {}
    )


def _has_no_decision(before: RunState, state: RunState, event: TransitionEvent) -> bool:
    """Return whether an event, from state `before` to `state`, leaves nothing to decide."""
    if isinstance(event, Paused):
        # Other members still run.
        return not state.is_planning and not isinstance(state.phase, FinishingPhase)
    if isinstance(event, Ready):
        return isinstance(state.phase, RejoiningPhase)
    if not isinstance(event, _MINOR_EVENTS):
        return False
    return before.log.next_iteration == state.log.next_iteration


def _decide_next(step: TransitionBuilder) -> None:
    state = step.state
    match state.phase:
        # The first order is given when all workers are ready.
        case GatheringPhase():
            if len(state.live) >= len(state.members) and all(
                worker in state.live for worker in state.members
            ):
                next_order.issue_next_order(step)
        case TrainingPhase() if state.all_paused:
            # Between two orders: after orders in vain with a pause.
            if next_order.give_up_unreachable(step) or step.at < _compute_retry_time(
                step.state, state.phase
            ):
                return
            # Unless only the speeds have changed, users see a recovery.
            if state.slow.decision is None or state.joins.is_complete:
                step.update_state(recovery=state.recovery.with_begin(step.at))
            next_order.issue_next_order(step)
        # While members train, prepare what comes next without disturbing them.
        case TrainingPhase():
            next_order.prepare_changes(step, state.phase)
        # A save that failed is ordered again, after a pause.
        case FinishingPhase(outdated=True):
            if not next_order.give_up_unreachable(step) and step.at >= _compute_finish_time(
                step.state, state.phase
            ):
                next_order.issue_next_order(step)


def _compute_retry_time(state: RunState, phase: TrainingPhase) -> float:
    """Return the time of `time.monotonic` before which no next order is given."""
    # After orders in vain the time is later: a network may be down for a minute.
    orders_in_vain = 0 if phase.started else state.vain
    return state.recovery.ordered_at + _compute_pause(max(orders_in_vain, state.empty.number - 1))


def _compute_finish_time(state: RunState, phase: FinishingPhase) -> float:
    return phase.ordered_at + _compute_pause(state.empty.number)


def _compute_pause(orders_in_vain: int) -> float:
    # Each pause is twice as long as the one before, up to a limit.
    tries = orders_in_vain - MAX_EMPTY_ORDERS
    return min(FIRST_RETRY_SECONDS * 2**tries, MAX_RETRY_SECONDS) if tries >= 0 else 0.0


def _handle_event(step: TransitionBuilder, event: TransitionEvent) -> None:
    state = step.state
    match event:
        # Progress of members.
        case IterationReport():
            _handle_reports(step, (event,))
        case ReportsReceived():
            _handle_reports(step, event.reports)
        case StepValidated():
            _commit_iterations(step, *state.log.with_factor(event.order, event.factor))
        case TrainingStarted():
            _handle_started(step, event)
        case Paused():
            _handle_paused(step, event)
        case Ready():
            _handle_ready(step, event)
        # Layers that move, files, and answers to requests.
        case FetchUpToDate():
            step.update_state(joins=state.joins.with_target_ready(event.worker, event.fetch, step))
        case FetchFailed():
            _handle_fetch_failed(step, event)
        case Finished():
            _handle_finished(step, event)
        case Published():
            _handle_published(step, event)
        case CheckpointSaved() if event.iteration < step.rules.iterations.stop:
            # The final save is not counted: it holds up no training.
            step.update_state(
                checkpoints=state.checkpoints.with_saved(event.iteration, event.seconds)
            )
        case ReadableCheckpoints() if event.worker in state.asked:
            step.update_state(readable=state.readable.with_entry(event.worker, event.iterations))
        case ScheduleAnswer():
            step.update_state(answers={**state.answers, event.question: event.answer})
        case SpeedAnswer():
            step.update_state(slow=state.slow.with_answer(event, state.log.next_iteration, step))
        # Losses, signals and timeouts.
        case WorkerLost():
            _handle_loss(step, event)
        case WorkerDisconnected():
            # Give no order before this worker is lost, so that workers that die together are lost
            # in one recovery, even if some of them have already paused.
            step.update_state(paused=state.paused.without_keys(event.worker))
        case Leaving():
            _handle_leaving(step, event.worker)
        case StopRequested():
            step.update_state(stopping=True)
            if isinstance(state.phase, RejoiningPhase | GatheringPhase):
                orders.send_leave(step)
        case AbortIteration() if state.stopping:
            orders.send_end_order(step)
        case StallFound() if isinstance(state.phase, TrainingPhase) and not state.phase.ended:
            step.update_state(
                empty=state.empty.with_report(event.workers, event.reason, stalled=True),
                recovery=state.recovery.with_cause(event.reason, step.at),
            )
            orders.send_end_order(step)
        case TimePassed() if isinstance(state.phase, RejoiningPhase) and state.phase.is_complete(
            step.at
        ):
            _adopt_found_workers(step, state.phase)


def _handle_ready(step: TransitionBuilder, report: Ready) -> None:
    # A worker with other code or data would compute other results.
    state, worker = step.state, report.worker
    difference = describe_difference(report.identity, step.rules.facts.identity, "there")
    if difference is not None:
        _refuse_worker(step, report, difference)
        return
    step.update_state(
        live=state.live.with_entry(worker, ConnectedWorker(report.addresses)),
        lost=state.lost.without_keys(worker),
    )
    if isinstance(state.phase, RejoiningPhase):
        step.update_state(phase=state.phase.with_worker(worker, report.known, step.at))


def _refuse_worker(step: TransitionBuilder, report: Ready, difference: str) -> None:
    """Send away a worker that trains something else, as `difference` says, or end the run."""
    # If the worker has trained under an earlier coordinator, this coordinator is the wrong one.
    phase, worker = step.state.phase, report.worker
    has_trained = report.known is not None and report.known.order > 0
    if isinstance(phase, RejoiningPhase) and has_trained:
        raise OtherRunError(
            f"worker {worker} is of a run that this job does not continue: {difference}"
        )
    # Before the first order nothing is lost if the run ends.
    if isinstance(phase, GatheringPhase):
        raise CommitLogError(
            f"worker {worker} would not train what node 0 does: {difference}; start every node "
            "with the same job file, code and data"
        )
    step.add_effect(
        Noted(text=f"worker {worker} is refused, and the run continues without it: {difference}")
    )
    step.send((worker,), Leave())


def _handle_reports(step: TransitionBuilder, reports: Sequence[IterationReport]) -> None:
    """Handle reports of members that have stepped an iteration, and acknowledge them."""
    earlier_difference = step.state.log.difference
    _commit_iterations(step, *step.state.log.with_reports(*reports))
    # Is something wrong with what they report?
    if (difference := step.state.log.difference) is not None:
        if earlier_difference is None:
            _handle_difference(step, difference)
        # No member steps the next iteration without an acknowledgement: this one can be undone.
        return
    if (iteration := step.state.log.nonfinite) is not None:
        _handle_nonfinite(step, iteration)
        return
    # Reports of orders that have ended are acknowledged at once: nothing follows from them.
    state, phase = step.state, step.state.phase
    current_reports = [
        report
        for report in reports
        if isinstance(phase, TrainingPhase)
        and report.order == state.order
        and report.worker in state.members
    ]
    if len(current_reports) < len(reports):
        for report in reports:
            if report not in current_reports:
                step.send((report.worker,), Acknowledged(report.order, report.iteration))
    if not current_reports:
        return
    assert isinstance(phase, TrainingPhase)
    # A member that runs no micro-batch sends nothing that others wait for. The others are
    # acknowledged only after its report: no member is over one step ahead of the last commit.
    answered: Sequence[IterationReport] = current_reports
    if phase.without_microbatches:
        answered, unanswered = [], list(phase.unanswered)
        for report in current_reports:
            unanswered.append(report)
            if state.log.has_reports_from(phase.without_microbatches, report.iteration):
                answered, unanswered = [*answered, *unanswered], []
        step.update_state(phase=replace(phase, unanswered=tuple(unanswered)))
    # An acknowledgement lets a member continue, or tells it where to stop or to save.
    by_iteration: dict[int, list[Worker]] = {}
    for report in answered:
        by_iteration.setdefault(report.iteration, []).append(report.worker)
    for iteration, workers in by_iteration.items():
        step.send(
            workers,
            Acknowledged(
                state.order,
                iteration,
                stop=iteration + 1 == phase.stop_before,
                save=iteration + 1 == phase.save_before,
                committed=state.log.last_committed,
            ),
        )


def _commit_iterations(
    step: TransitionBuilder, log: CommitLog, committed: Iterable[CommittedIteration]
) -> None:
    # A commit ends all doubts about the order: its members reach each other.
    step.update_state(log=log)
    for iteration in committed:
        step.add_effect(iteration)
        state = step.state
        step.update_state(
            recovery=state.recovery.with_commit(step.at),
            slow=state.slow.with_iteration(iteration),
            empty=NO_EMPTY_ORDERS,
        )


def _handle_difference(
    step: TransitionBuilder, difference: CopyDifference | SampleDifference
) -> None:
    # If it is not known who has wrong samples, no worker can be given up: the run ends.
    if isinstance(difference, SampleDifference):
        difference = difference.with_suspects(step.state.newcomers)
        if not difference.wrong:
            raise RunError(
                f"{difference}; expected the same on every worker: data may depend on nothing but "
                "the name of the sample, and costs on nothing but the iteration"
            )
    # Copies that differ again after a return were not flipped by chance.
    why = str(difference)
    if not difference.wrong and difference.iteration <= step.state.doubted:
        raise RunError(
            f"{why}, as before the run went back: their hardware or libraries compute different "
            "results"
        )
    # Who is wrong leaves; the run goes back only if what is wrong may have spread.
    step.add_effect(Noted(text=why))
    step.update_state(
        recovery=step.state.recovery.with_cause(why, step.at),
        faulty=difference.wrong,
        fault=difference.fault,
    )
    if difference.spread:
        step.update_state(
            doubt=why, doubted=step.state.doubted if difference.wrong else difference.iteration
        )
    orders.send_end_order(step, doubted=difference.spread)


def _handle_nonfinite(step: TransitionBuilder, iteration: int) -> None:
    """Run an iteration again whose loss is not finite; next go back, then raise CommitLogError."""
    state, what = step.state, f"the loss of iteration {iteration} is not finite"
    if not isinstance(state.phase, TrainingPhase) or state.phase.ended:
        return
    # The iteration is first run again: its order compares copies, and what follows from a
    # difference is decided as always.
    if iteration != state.repeated:
        why = f"{what}: the iteration is run again, and copies of the state are compared"
        step.update_state(repeated=iteration)
    elif not state.log.has_all_reports(iteration):
        return  # the copies have not been compared yet
    # After a return to a checkpoint, no flipped bit can be the reason.
    elif iteration <= state.returned_for:
        raise CommitLogError(
            f"{what}: it was not before the run went back, either, and all copies are equal; try a "
            "smaller training.learning_rate"
        )
    else:
        # All may have stepped with a wrong gradient before: the run goes back to a checkpoint.
        why = f"{what} again, and all copies are equal"
        step.update_state(repeated=-1, returned_for=iteration, doubt=why)
    step.add_effect(Noted(text=why))
    step.update_state(recovery=state.recovery.with_cause(why, step.at))
    orders.send_end_order(step, doubted=step.state.doubt is not None)


def _handle_started(step: TransitionBuilder, report: TrainingStarted) -> None:
    """Handle a member that begins its first op; a recovery ends when all have begun."""
    state = step.state
    if (
        not isinstance(state.phase, TrainingPhase)
        or report.order != state.order
        or state.phase.ended
    ):
        return  # a late report of an order that another recovery has ended
    started = state.phase.started.with_entry(report.worker, None)
    step.update_state(phase=replace(state.phase, started=started))
    # The last one ends the recovery, if there was one.
    if len(started) < len(state.members):
        return
    step.update_state(
        recovery=state.recovery.with_end(state.log.next_iteration, len(state.members), step.at)
    )
    if len(step.state.recovery.recoveries) > len(state.recovery.recoveries):
        recovery = step.state.recovery.recoveries[-1]
        step.add_effect(Resumed(pause=round(recovery.seconds, 3), live=recovery.live))
        step.add_effect(recovery)


def _handle_paused(step: TransitionBuilder, report: Paused) -> None:
    """Handle a member that has stopped; after an error, all are told to stop."""
    # A factor that only this member has received may complete a commit.
    if report.validated is not None:
        _commit_iterations(step, *step.state.log.with_factor(report.order, report.validated))
    state, worker = step.state, report.worker
    if report.order != state.order or worker not in state.members:
        return
    # An error while files are written, perhaps after the member had paused.
    if isinstance(state.phase, FinishingPhase) and report.reason is not None:
        step.update_state(
            phase=replace(state.phase, outdated=True),
            empty=state.empty.with_report(
                report.named or (worker,), f"worker {worker}: {report.reason}"
            ),
        )
    if worker in state.paused:
        return
    step.update_state(paused=state.paused.with_entry(worker, report.kept))
    # The first error is the cause; later ones may only follow from it.
    if report.reason is not None:
        if isinstance(state.phase, TrainingPhase) and not state.phase.ended:
            step.update_state(recovery=state.recovery.with_cause(_describe_cause(report), step.at))
        if report.data_end is not None:
            _handle_data_end(step, report.data_end, report.reason)
        elif report.named or (isinstance(state.phase, TrainingPhase) and not state.phase.ended):
            step.update_state(
                empty=state.empty.with_report(
                    report.named or (worker,), f"worker {worker}: {report.reason}"
                )
            )
        orders.send_end_order(step)


def _describe_cause(report: Paused) -> str:
    if report.data_end is not None:
        return str(report.reason)
    return f"worker {report.worker}{' lost a connection,' if report.named else ':'} {report.reason}"


def _handle_data_end(step: TransitionBuilder, iteration: int, reason: str) -> None:
    # A member may find the end before the preceding iteration is committed, which is run first.
    earlier = step.state.data_end
    if earlier is None or iteration < earlier:
        step.update_state(data_end=iteration)
        step.add_effect(Noted(text=f"{reason}: the run ends before it"))


def _handle_fetch_failed(step: TransitionBuilder, report: FetchFailed) -> None:
    # A worker that wants to join and never reaches a sender is given up, since members would wait
    # for its layers in vain.
    state, worker = step.state, report.worker
    step.update_state(joins=state.joins.with_failure(report, state.live, step))
    # Only a joining worker that could not reach a sender is at fault itself.
    failures = step.state.joins.failures
    if (
        failures > state.joins.failures
        and failures >= MAX_FETCH_FAILURES
        and report.unreachable
        and worker not in state.members
    ):
        step.update_state(joins=replace(step.state.joins, failures=0))
        step.add_effect(
            GiveUpWorker(
                worker,
                f"worker {worker} could not get its layers {failures} times in a row, "
                f"{report.reason}",
            )
        )


def _handle_finished(step: TransitionBuilder, report: Finished) -> None:
    """Handle a member that has written drafts; after the last, all may publish theirs."""
    state = step.state
    if (
        not isinstance(state.phase, FinishingPhase)
        or report.order != state.order
        or report.worker not in state.members
    ):
        return
    # The digests of a parameter must agree, whoever holds it.
    finished = state.phase.finished.with_entry(report.worker, report)
    step.update_state(
        log=state.log.with_finished(report), phase=replace(state.phase, finished=finished)
    )
    # A checkpoint of copies that differ would be worse than none.
    if len(finished) == len(state.members):
        difference = find_difference(
            state.log.next_iteration, (entry for _, entry in finished.items())
        )
        if difference is not None:
            raise CommitLogError(f"{difference}; the state is not saved")
        step.send(sorted(state.members), Publish(state.order))


def _handle_published(step: TransitionBuilder, report: Published) -> None:
    """Handle a member that has published; after the last, all or the leaving members leave."""
    state = step.state
    if (
        not isinstance(state.phase, FinishingPhase)
        or report.order != state.order
        or report.worker not in state.members
    ):
        return
    published = state.phase.published.with_entry(report.worker, None)
    step.update_state(phase=replace(state.phase, published=published))
    if len(published) == len(state.members) and not next_order.release_after_save(step):
        orders.send_leave(step)


def _handle_loss(step: TransitionBuilder, event: WorkerLost) -> None:
    # Keep the reason, and what was lost, for users if the run cannot continue.
    state, worker = step.state, event.worker
    was_member = worker in state.members
    layers = frozenset[int]()
    if worker in state.current.seat_of:
        layers = step.rules.placement.held_layers(state.current, worker)
    step.update_state(lost=state.lost.with_entry(worker, WorkerLoss(event.reason, layers)))
    step.remove_workers([worker])
    if not was_member:
        step.add_effect(Noted(text=f"{event.reason}, before it took part"))
        return
    # A member's loss ends the order for all.
    record_losses(step, [(worker, event.reason)], event.since)
    record_node_losses(step, [worker])
    orders.send_end_order(step)
    if isinstance(step.state.phase, FinishingPhase):
        step.update_state(phase=replace(step.state.phase, outdated=True))


def _handle_leaving(step: TransitionBuilder, worker: Worker) -> None:
    # A member stays until the next iteration boundary, so that the others can continue without it;
    # any other worker leaves at once.
    state = step.state
    if isinstance(state.phase, TrainingPhase | FinishingPhase) and worker in state.members:
        step.update_state(leaving=state.leaving | {worker})
    elif isinstance(state.phase, RejoiningPhase | GatheringPhase | TrainingPhase):
        step.remove_workers([worker])  # its order has not been given yet
        step.send((worker,), Leave())


def _adopt_found_workers(step: TransitionBuilder, phase: RejoiningPhase) -> None:
    # Workers that were found count as the members of an order that has ended.
    result = phase.build_result()
    members = frozenset(result.kept)
    step.add_effect(result)
    step.add_effect(CoordinatorRestarted(live=len(members)))
    # They hold the state after the last committed iteration, or nothing.
    why = f"node 0 was restarted and has found {len(members)} workers"
    state = step.state
    step.update_state(
        phase=TrainingPhase(ended=True),
        order=result.order,
        members=members,
        trusted_from=result.trusted_from,
        rebalanced=not result.missing,
        paused=PersistentMap(result.kept.items()),
        log=state.log.with_losses(result.losses, result.factor),
        recovery=state.recovery.with_cause(why, step.at),
    )
    if result.doubted:
        step.update_state(
            doubt="the state could not be trusted, as workers reported to the new node 0"
        )
    # All other members of that order are lost.
    reasons = [
        (worker, f"worker {worker} was not found by the new node 0") for worker in result.missing
    ]
    losses = [(worker, WorkerLoss(reason)) for worker, reason in reasons]
    step.update_state(lost=PersistentMap([*state.lost.items(), *losses]))
    record_losses(step, reasons, step.at)
    record_node_losses(step, result.missing)
