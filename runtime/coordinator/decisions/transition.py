"""Apply each event to the state of a run, and find which effects it has.

The event loop calls `apply_event` with each event in turn; the result depends only on the state,
the event and its time. An order to train ends when a member is lost or reports an error, or before
an iteration that was chosen for all members to stop at. When all remaining members have paused and
a schedule for them is available, the next order is given (`next_order`). It begins at the first
iteration that is not committed. An event that arrives while a schedule is being planned only
changes which workers are waited for.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import next_order, orders
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog, CommitLogError, CommittedIteration
from slipstream.runtime.coordinator.decisions.comparisons import CopyDifference, SampleDifference, find_difference
from slipstream.runtime.coordinator.decisions.effects import GiveUpWorker, ScheduleAnswer
from slipstream.runtime.coordinator.decisions.failover import RejoiningPhase
from slipstream.runtime.coordinator.decisions.orders import record_losses, record_node_losses
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
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
from slipstream.runtime.coordinator.decisions.settling import MAX_FETCH_FAILURES
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
"""Orders in a row that may end before any op or commit. Several workers may die together, or not
reach each other. Each further such order is followed by a pause."""
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 0.5, 30.0
"""First and longest pause after too many empty orders. Each is twice the one before, as refused
connections may have left threads behind."""


class WorkerLost(NamedTuple):
    """Event: a worker is lost."""

    worker: Worker
    reason: str
    since: float
    """Time of `time.monotonic` since which the worker did not respond."""


class ReportsReceived(NamedTuple):
    """Event: a node agent has forwarded several reports of workers that have stepped an
    iteration."""

    reports: tuple[IterationReport, ...]


class WorkerDisconnected(NamedTuple):
    """Event: the connection to a worker's process has closed; its loss should follow."""

    worker: Worker


class StopRequested(NamedTuple):
    """Event: the run was told to end at the next iteration boundary, with a checkpoint."""


class AbortIteration(NamedTuple):
    """Event: a run that was told to end has used its time, and stops at once."""


class StallFound(NamedTuple):
    """Event: nothing has been committed for long, because these members wait for each other."""

    workers: tuple[Worker, ...]
    reason: str


class TimePassed(NamedTuple):
    """Event: some time has passed, so that timeouts may have expired."""


_MINOR_EVENTS = IterationReport, ReportsReceived, StepValidated, TrainingStarted, CheckpointSaved
"""Events after which nothing has to be decided unless they commit an iteration."""
TransitionEvent = ToCoordinator | ReportsReceived | ScheduleAnswer | SpeedAnswer | WorkerLost \
    | WorkerDisconnected | StopRequested | AbortIteration | StallFound | TimePassed


def apply_event(rules: RunRules, state: RunState, event: TransitionEvent, at: float) -> tuple[RunState, list[Any]]:
    """Return the state after an event at time `at` (`time.monotonic`), and its effects in order.

    Raises RunError if the run cannot continue, CommitLogError if workers disagree, OtherRunError if
    a worker that is found is of another run, and NoLiveWorkerError if no worker of a dead
    coordinator can be found.
    """
    step = TransitionBuilder(rules, state, at)
    _handle_event(step, event)
    if not _has_no_decision(state, step.state, event):
        _decide_next(step)
    return step.state, step.effects


def find_awaited_workers(state: RunState) -> list[Worker]:
    """Return the workers that the first order, or a new coordinator, still waits for."""
    if isinstance(state.phase, RejoiningPhase):
        return sorted(state.phase.missing_members)
    return sorted(state.members.difference(state.live)) if isinstance(state.phase, GatheringPhase) else []


def find_needed_layers(rules: RunRules, state: RunState) -> Mapping[Worker, frozenset[int]]:
    """Return the layers that each member needs to train or finish; otherwise none."""
    return state.find_held_layers(rules.placement) if isinstance(state.phase, TrainingPhase | FinishingPhase) else {}


def _has_no_decision(before: RunState, state: RunState, event: TransitionEvent) -> bool:
    """Return whether an event leaves nothing to decide, as most in a large run."""
    if isinstance(event, Paused):
        return not state.is_planning and not isinstance(state.phase, FinishingPhase)  # other members still run
    if isinstance(event, Ready):
        return isinstance(state.phase, RejoiningPhase)
    if not isinstance(event, _MINOR_EVENTS):
        return False
    return before.log.next_iteration == state.log.next_iteration


def _decide_next(step: TransitionBuilder) -> None:
    """Take the decisions that the new state makes possible. Raises RunError."""
    state = step.state
    match state.phase:
        case GatheringPhase():
            if len(state.live) >= len(state.members) and all(worker in state.live for worker in state.members):
                next_order.issue_next_order(step)
        case TrainingPhase() if state.all_paused:
            if next_order.give_up_unreachable(step) or step.at < _compute_retry_time(step.state, state.phase):
                return
            if state.slow.decision is None or state.joins.is_complete:
                step.update_state(recovery=state.recovery.with_begin(step.at))
            next_order.issue_next_order(step)
        case TrainingPhase():
            next_order.prepare_changes(step, state.phase)
        case FinishingPhase(outdated=True):
            if not next_order.give_up_unreachable(step) and step.at >= _compute_finish_time(step.state, state.phase):
                next_order.issue_next_order(step)


def _compute_retry_time(state: RunState, phase: TrainingPhase) -> float:
    """Return the time of `time.monotonic` before which no next order is given."""
    # It is later after orders in vain: a network may be down for a minute.
    orders_in_vain = 0 if phase.started else state.vain
    return state.recovery.ordered_at + _compute_pause(max(orders_in_vain, state.empty.number - 1))


def _compute_finish_time(state: RunState, phase: FinishingPhase) -> float:
    return phase.ordered_at + _compute_pause(state.empty.number)


def _compute_pause(orders_in_vain: int) -> float:
    tries = orders_in_vain - MAX_EMPTY_ORDERS
    return min(FIRST_RETRY_SECONDS * 2**tries, MAX_RETRY_SECONDS) if tries >= 0 else 0.0


def _handle_event(step: TransitionBuilder, event: TransitionEvent) -> None:
    state = step.state
    match event:
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
        case FetchUpToDate():
            step.update_state(joins=state.joins.with_target_ready(event.worker, event.fetch, step))
        case FetchFailed():
            _handle_fetch_failed(step, event)
        case Finished():
            _handle_finished(step, event)
        case Published():
            _handle_published(step, event)
        case CheckpointSaved() if event.iteration < step.rules.iterations.stop:  # the final save holds up no training
            step.update_state(checkpoints=state.checkpoints.with_saved(event.iteration, event.seconds))
        case ReadableCheckpoints() if event.worker in state.asked:
            step.update_state(readable=state.readable.with_entry(event.worker, event.iterations))
        case ScheduleAnswer():
            step.update_state(answers={**state.answers, event.question: event.answer})
        case SpeedAnswer():
            step.update_state(slow=state.slow.with_answer(event, state.log.next_iteration, step))
        case WorkerLost():
            _handle_loss(step, event)
        case WorkerDisconnected():
            # Give no order before this worker is lost, so that workers that die together are lost in one recovery,
            # even if some of them have already paused.
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
            step.update_state(empty=state.empty.with_report(event.workers, event.reason, stalled=True),
                              recovery=state.recovery.with_cause(event.reason, step.at))
            orders.send_end_order(step)
        case TimePassed() if isinstance(state.phase, RejoiningPhase) and state.phase.is_complete(step.at):
            _adopt_found_workers(step, state.phase)


def _handle_ready(step: TransitionBuilder, report: Ready) -> None:
    """Add a worker that waits for an order, or refuse one that trains something else."""
    state, worker = step.state, report.worker
    difference = describe_difference(report.identity, step.rules.facts.identity, "there")
    if difference is not None:
        _refuse_worker(step, report, difference)
        return
    step.update_state(live=state.live.with_entry(worker, ConnectedWorker(report.addresses)),
                      lost=state.lost.without_keys(worker))
    if isinstance(state.phase, RejoiningPhase):
        step.update_state(phase=state.phase.with_worker(worker, report.known, step.at))


def _refuse_worker(step: TransitionBuilder, report: Ready, difference: str) -> None:
    """Make a worker leave that would train something else than the run."""
    # Raises CommitLogError before the first order, and OtherRunError if the worker has trained
    # under a coordinator before this one: then this coordinator is the one that is wrong.
    phase, worker = step.state.phase, report.worker
    has_trained = report.known is not None and report.known.order > 0
    if isinstance(phase, RejoiningPhase) and has_trained:
        raise OtherRunError(f"worker {worker} is of a run that this job does not continue: {difference}")
    if isinstance(phase, GatheringPhase):
        raise CommitLogError(f"worker {worker} would not train what node 0 does: {difference}; start every node with "
                             "the same job file, code and data")
    step.add_effect(Noted(text=f"worker {worker} is refused, and the run continues without it: {difference}"))
    step.send((worker,), Leave())


def _handle_reports(step: TransitionBuilder, reports: Sequence[IterationReport]) -> None:
    """Handle reports of members that have stepped an iteration, and acknowledge them."""
    # An acknowledgement lets a member continue, or tells it where to stop. A member that runs no
    # micro-batch sends nothing that others wait for. The others are therefore acknowledged only
    # after its report, so that no member is more than one step ahead of the last commit.
    compared = step.state.log.difference
    _commit_iterations(step, *step.state.log.with_reports(*reports))
    if (difference := step.state.log.difference) is not None:
        if compared is None:
            _handle_difference(step, difference)
        return  # no member steps the next iteration without an acknowledgement: this one can be undone
    if (iteration := step.state.log.nonfinite) is not None:
        _handle_nonfinite(step, iteration)
        return
    state, phase = step.state, step.state.phase
    current_reports = [report for report in reports if isinstance(phase, TrainingPhase) and report.order == state.order
                       and report.worker in state.members]
    if len(current_reports) < len(reports):
        for report in reports:
            if report not in current_reports:
                step.send((report.worker,), Acknowledged(report.order, report.iteration))
    if not current_reports:
        return
    assert isinstance(phase, TrainingPhase)
    answered: Sequence[IterationReport] = current_reports
    if phase.without_microbatches:
        answered, unanswered = [], list(phase.unanswered)
        for report in current_reports:
            unanswered.append(report)
            if state.log.has_reports_from(phase.without_microbatches, report.iteration):
                answered, unanswered = [*answered, *unanswered], []
        step.update_state(phase=replace(phase, unanswered=tuple(unanswered)))
    by_iteration: dict[int, list[Worker]] = {}
    for report in answered:
        by_iteration.setdefault(report.iteration, []).append(report.worker)
    for iteration, workers in by_iteration.items():
        step.send(workers, Acknowledged(
            state.order, iteration, stop=iteration + 1 == phase.stop_before, save=iteration + 1 == phase.save_before,
            committed=state.log.last_committed))


def _commit_iterations(step: TransitionBuilder, log: CommitLog, committed: Iterable[CommittedIteration]) -> None:
    step.update_state(log=log)
    for iteration in committed:
        step.add_effect(iteration)
        state = step.state
        step.update_state(recovery=state.recovery.with_commit(step.at), slow=state.slow.with_iteration(iteration),
                          empty=NO_EMPTY_ORDERS)


def _handle_difference(step: TransitionBuilder, difference: CopyDifference | SampleDifference) -> None:
    """Give up wrong workers, and go back if what is wrong may have spread."""
    # Raises RunError if no sample is known to be wrong, or if no copy is and the run has already
    # gone back for a difference at this iteration or a later one.
    if isinstance(difference, SampleDifference):
        difference = difference.with_suspects(step.state.newcomers)
        if not difference.wrong:
            raise RunError(f"{difference}; expected the same on every worker: data may depend on nothing but the name "
                           "of the sample, and costs on nothing but the iteration")
    why = str(difference)
    if not difference.wrong and difference.iteration <= step.state.doubted:
        raise RunError(f"{why}, as before the run went back: their hardware or libraries compute different results")
    step.add_effect(Noted(text=why))
    step.update_state(recovery=step.state.recovery.with_cause(why, step.at), faulty=difference.wrong,
                      fault=difference.fault)
    if difference.spread:
        step.update_state(doubt=why, doubted=step.state.doubted if difference.wrong else difference.iteration)
    orders.send_end_order(step, doubted=difference.spread)


def _handle_nonfinite(step: TransitionBuilder, iteration: int) -> None:
    """Handle a loss that is not finite, for a flipped bit or the learning rate."""
    # The iteration is first run again: its order compares copies, and what follows from a
    # difference is decided as always. If they are equal, all may have stepped with a wrong
    # gradient, and the run goes back to a checkpoint. Raises CommitLogError if the loss is not
    # finite after that, either, with equal copies.
    state, what = step.state, f"the loss of iteration {iteration} is not finite"
    if not isinstance(state.phase, TrainingPhase) or state.phase.ended:
        return
    if iteration != state.repeated:
        why = f"{what}: the iteration is run again, and copies of the state are compared"
        step.update_state(repeated=iteration)
    elif not state.log.has_all_reports(iteration):
        return  # the copies have not been compared yet
    elif iteration <= state.returned_for:
        raise CommitLogError(f"{what}: it was not before the run went back, either, and all copies are equal; try a "
                             "smaller training.learning_rate")
    else:
        why = f"{what} again, and all copies are equal"
        step.update_state(repeated=-1, returned_for=iteration, doubt=why)
    step.add_effect(Noted(text=why))
    step.update_state(recovery=state.recovery.with_cause(why, step.at))
    orders.send_end_order(step, doubted=step.state.doubt is not None)


def _handle_started(step: TransitionBuilder, report: TrainingStarted) -> None:
    """Handle a member that begins its first op; a recovery ends when all have begun."""
    state = step.state
    if not isinstance(state.phase, TrainingPhase) or report.order != state.order or state.phase.ended:
        return  # a late report of an order that another recovery has ended
    started = state.phase.started.with_entry(report.worker, None)
    step.update_state(phase=replace(state.phase, started=started))
    if len(started) < len(state.members):
        return
    step.update_state(recovery=state.recovery.with_end(state.log.next_iteration, len(state.members), step.at))
    if len(step.state.recovery.recoveries) > len(state.recovery.recoveries):
        recovery = step.state.recovery.recoveries[-1]
        step.add_effect(Resumed(pause=round(recovery.seconds, 3), live=recovery.live))
        step.add_effect(recovery)


def _handle_paused(step: TransitionBuilder, report: Paused) -> None:
    """Handle a member that has stopped; after an error, all are told to stop."""
    if report.validated is not None:
        _commit_iterations(step, *step.state.log.with_factor(report.order, report.validated))
    state, worker = step.state, report.worker
    if report.order != state.order or worker not in state.members:
        return
    if isinstance(state.phase, FinishingPhase) and report.reason is not None:
        step.update_state(phase=replace(state.phase, outdated=True),
                          empty=state.empty.with_report(report.named or (worker,), f"worker {worker}: {report.reason}"))
    if worker in state.paused:
        return
    step.update_state(paused=state.paused.with_entry(worker, report.kept))
    if report.reason is not None:
        if isinstance(state.phase, TrainingPhase) and not state.phase.ended:
            step.update_state(recovery=state.recovery.with_cause(_describe_cause(report), step.at))
        if report.data_end is not None:
            _handle_data_end(step, report.data_end, report.reason)
        elif report.named or (isinstance(state.phase, TrainingPhase) and not state.phase.ended):
            step.update_state(empty=state.empty.with_report(report.named or (worker,),
                                                            f"worker {worker}: {report.reason}"))
        orders.send_end_order(step)


def _describe_cause(report: Paused) -> str:
    if report.data_end is not None:
        return str(report.reason)
    return f"worker {report.worker}{' lost a connection,' if report.named else ':'} {report.reason}"


def _handle_data_end(step: TransitionBuilder, iteration: int, reason: str) -> None:
    """End the run before an iteration for which the data have no samples."""
    # A member may find that before the iteration before is committed, which is then run first.
    known = step.state.data_end
    if known is None or iteration < known:
        step.update_state(data_end=iteration)
        step.add_effect(Noted(text=f"{reason}: the run ends before it"))


def _handle_fetch_failed(step: TransitionBuilder, report: FetchFailed) -> None:
    """Handle a worker that cannot get the layers of a fetch."""
    # One that wants to join and never reaches a sender is given up, since members would wait for
    # its layers in vain.
    state, worker = step.state, report.worker
    step.update_state(joins=state.joins.with_failure(report, state.live, step))
    failures = step.state.joins.failures
    if failures > state.joins.failures and failures >= MAX_FETCH_FAILURES and report.unreachable \
            and worker not in state.members:
        step.update_state(joins=replace(step.state.joins, failures=0))
        step.add_effect(GiveUpWorker(worker, f"worker {worker} could not get its layers {failures} times in a row, "
                                             f"{report.reason}"))


def _handle_finished(step: TransitionBuilder, report: Finished) -> None:
    """Handle a member that has written drafts; after the last, all may publish theirs."""
    # If their state differs, CommitLogError is raised, and nothing is published.
    state = step.state
    if not isinstance(state.phase, FinishingPhase) or report.order != state.order or report.worker not in state.members:
        return
    finished = state.phase.finished.with_entry(report.worker, report)
    step.update_state(log=state.log.with_finished(report), phase=replace(state.phase, finished=finished))
    if len(finished) == len(state.members):
        difference = find_difference(state.log.next_iteration, (entry for _, entry in finished.items()))
        if difference is not None:
            raise CommitLogError(f"{difference}; the state is not saved")
        step.send(sorted(state.members), Publish(state.order))


def _handle_published(step: TransitionBuilder, report: Published) -> None:
    """Handle a member that has published its drafts; after the last, all or some leave."""
    state = step.state
    if not isinstance(state.phase, FinishingPhase) or report.order != state.order or report.worker not in state.members:
        return
    published = state.phase.published.with_entry(report.worker, None)
    step.update_state(phase=replace(state.phase, published=published))
    if len(published) == len(state.members) and not next_order.release_after_save(step):
        orders.send_leave(step)


def _handle_loss(step: TransitionBuilder, event: WorkerLost) -> None:
    state, worker = step.state, event.worker
    was_member = worker in state.members
    layers = step.rules.placement.held_layers(state.current, worker) if worker in state.current.seat_of \
        else frozenset[int]()
    step.update_state(lost=state.lost.with_entry(worker, WorkerLoss(event.reason, layers)))
    step.remove_workers([worker])
    if not was_member:
        step.add_effect(Noted(text=f"{event.reason}, before it took part"))
        return
    record_losses(step, [(worker, event.reason)], event.since)
    record_node_losses(step, [worker])
    orders.send_end_order(step)
    if isinstance(step.state.phase, FinishingPhase):
        step.update_state(phase=replace(step.state.phase, outdated=True))


def _handle_leaving(step: TransitionBuilder, worker: Worker) -> None:
    """Handle a worker that received a signal to end."""
    # A member stays until the next iteration boundary, so that the others can continue without it;
    # any other worker leaves at once.
    state = step.state
    if isinstance(state.phase, TrainingPhase | FinishingPhase) and worker in state.members:
        step.update_state(leaving=state.leaving | {worker})
    elif isinstance(state.phase, RejoiningPhase | GatheringPhase | TrainingPhase):
        step.remove_workers([worker])  # its order has not been given yet
        step.send((worker,), Leave())


def _adopt_found_workers(step: TransitionBuilder, phase: RejoiningPhase) -> None:
    result = phase.build_result()
    members = frozenset(result.kept)
    step.add_effect(result)
    step.add_effect(CoordinatorRestarted(live=len(members)))
    why = f"node 0 was restarted and has found {len(members)} workers"
    state = step.state
    step.update_state(phase=TrainingPhase(ended=True), order=result.order, members=members,
                      trusted_from=result.trusted_from,
                      settled=not result.missing, paused=PersistentMap(result.kept.items()),
                      log=state.log.with_losses(result.losses, result.factor),
                      recovery=state.recovery.with_cause(why, step.at))
    if result.doubted:
        step.update_state(doubt="copies differed, as workers reported to the new node 0")
    reasons = [(worker, f"worker {worker} was not found by the new node 0") for worker in result.missing]
    step.update_state(lost=PersistentMap([*state.lost.items(),
                                          *((worker, WorkerLoss(reason)) for worker, reason in reasons)]))
    record_losses(step, reasons, step.at)
    record_node_losses(step, result.missing)
