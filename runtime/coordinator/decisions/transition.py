"""Transition: what each event changes in the state of a run, and which effects it has.

The event loop calls `transition` with each event in turn; the result depends only on the state, the event and its time.
An order to train ends when a member is lost or reports an error, or before an iteration that was chosen for all members
to stop at (`iteration_boundary`). When all remaining members have paused and a schedule for them is available, the next
order is given (`next_order`). It begins at the first iteration that is not committed. An event that arrives while a
schedule is being planned only changes which workers are waited for.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import iteration_boundary, next_order, orders
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog, CommitLogError, Committed
from slipstream.runtime.coordinator.decisions.copy_comparison import Difference
from slipstream.runtime.coordinator.decisions.failover import Rejoining
from slipstream.runtime.coordinator.decisions.lost_workers import Loss
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.questions import ScheduleFound
from slipstream.runtime.coordinator.decisions.run_state import (
    Finishing,
    Gathering,
    Present,
    Rules,
    RunState,
    Step,
    Training,
)
from slipstream.runtime.coordinator.decisions.speed_planning import SpeedsPlanned
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import CoordinatorRestarted, Noted, Resumed
from slipstream.runtime.protocol.to_coordinator import (
    Checkpoints,
    FetchFailed,
    FetchUpToDate,
    Finished,
    Leaving,
    Paused,
    Ran,
    Ready,
    Saved,
    Started,
    ToCoordinator,
    Validated,
)
from slipstream.runtime.protocol.to_worker import Acknowledged, Leave
from slipstream.schedules.schedule import Worker

VAIN = 2
"""Number of consecutive orders that may end before any member has begun an op, as when several workers die together.
Each further such order is followed by a pause."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""First and longest pause after such an order. Pauses double, as refused connections may have left threads behind."""


class Lost(NamedTuple):
    """Event: a worker is lost."""

    worker: Worker
    reason: str
    since: float
    """Time of `time.monotonic` since which the worker did not respond."""


class Reports(NamedTuple):
    """Event: a node agent has forwarded several reports of workers that have stepped an iteration."""

    reports: tuple[Ran, ...]


class Disconnected(NamedTuple):
    """Event: the connection to a process of a worker has closed, so that the worker will be lost shortly."""

    worker: Worker


class Stop(NamedTuple):
    """Event: the run was told to end at the next iteration boundary, with a checkpoint."""


class Hurry(NamedTuple):
    """Event: a run that was told to end must stop now and does not wait for the end of the iteration."""


class Look(NamedTuple):
    """Event: some time has passed, so that timeouts may have expired."""


_CHANGE_LITTLE = Ran, Reports, Validated, Started, Saved
"""Events after which nothing has to be decided unless they commit an iteration."""
Event = ToCoordinator | Reports | ScheduleFound | SpeedsPlanned | Lost | Disconnected | Stop | Hurry | Look


def transition(rules: Rules, state: RunState, event: Event, at: float) -> tuple[RunState, list[Any]]:
    """Return the state after an event, and the effects of the event in order (`effects`).

    The event happened at `at`, a time of `time.monotonic`. Raises RunError if the run cannot continue, CommitLogError
    if workers disagree, and NobodyLeftError if no worker of a dead coordinator can be found.
    """
    step = Step(rules, state, at)
    _handle(step, event)
    if not _nothing_follows(state, step.state, event):
        _advance(step)
    return step.state, step.effects


def awaited(state: RunState) -> list[Worker]:
    """Return the workers without which the first order cannot be given, or that a new coordinator still looks for."""
    if isinstance(state.phase, Rejoining):
        return sorted(state.phase.missing)
    return sorted(state.members.difference(state.live)) if isinstance(state.phase, Gathering) else []


def held(rules: Rules, state: RunState) -> Mapping[Worker, frozenset[int]]:
    """Return the layers that each member needs for the current order; empty if there is no such order."""
    return state.held_now(rules.placement) if isinstance(state.phase, Training | Finishing) else {}


def _nothing_follows(before: RunState, state: RunState, event: Event) -> bool:
    """Return whether an event leaves nothing to decide. Most events of a large run are of this kind."""
    if isinstance(event, Paused):
        return not state.planning  # other members still run
    if isinstance(event, Ready):
        return isinstance(state.phase, Rejoining)
    if not isinstance(event, _CHANGE_LITTLE):
        return False
    return before.log.next_iteration == state.log.next_iteration


def _advance(step: Step) -> None:
    """Take the decisions that the new state makes possible. Raises RunError."""
    state = step.state
    match state.phase:
        case Gathering():
            if len(state.live) >= len(state.members) and all(worker in state.live for worker in state.members):
                next_order.give(step)
        case Training() if state.all_paused and not state.phase.started and step.at < _next_try(state):
            pass
        case Training() if state.all_paused:
            if state.slow.decision is None or state.joins.complete:
                step.change(recovery=state.recovery.begin(step.at))
            next_order.give(step)
        case Training():
            iteration_boundary.look(step, state.phase)
        case Finishing(outdated=True):
            next_order.give(step)


def _next_try(state: RunState) -> float:
    """Return the earliest time of the next order: later than now if several in a row ended before any op began."""
    tries = state.vain - VAIN
    return state.recovery.ordered_at + min(FIRST_PAUSE_SECONDS * 2**tries, LONGEST_PAUSE_SECONDS) if tries >= 0 else 0.0


def _handle(step: Step, event: Event) -> None:
    state = step.state
    match event:
        case Ran():
            _ran(step, (event,))
        case Reports():
            _ran(step, event.reports)
        case Validated():
            _commit(step, *state.log.validated(event.order, event.factor))
        case Started():
            _started(step, event)
        case Paused():
            _paused(step, event)
        case Ready():
            _ready(step, event)
        case FetchUpToDate():
            step.change(joins=state.joins.fetch_up_to_date(event.worker, event.fetch, step))
        case FetchFailed():
            step.change(joins=state.joins.fetch_failed(event.fetch, state.live, step))
        case Finished():
            _finished(step, event)
        case Saved() if event.iteration < step.rules.iterations.stop:  # the final save holds up no training
            step.change(checkpoints=state.checkpoints.saved(event.iteration, event.seconds))
        case Checkpoints() if event.worker in state.asked:
            step.change(readable=state.readable.adding(event.worker, event.iterations))
        case ScheduleFound():
            step.change(answers={**state.answers, event.question: event.answer})
        case SpeedsPlanned():
            step.change(slow=state.slow.planned(event, state.log.next_iteration, step))
        case Lost():
            _lost(step, event)
        case Disconnected():
            # Give no order before this worker is lost, so that workers that die together are lost in one recovery,
            # even if some of them have already paused.
            step.change(paused=state.paused.without(event.worker))
        case Leaving():
            _leaving(step, event.worker)
        case Stop():
            step.change(stopping=True)
            if isinstance(state.phase, Rejoining | Gathering):
                orders.leave(step)
        case Hurry() if state.stopping:
            orders.end(step)
        case Look() if isinstance(state.phase, Rejoining) and state.phase.over(step.at):
            _take_over(step, state.phase)


def _ready(step: Step, report: Ready) -> None:
    """Add a worker that waits for an order. Raises CommitLogError if its text or sample costs differ from others'."""
    state, worker = step.state, report.worker
    corpus = state.corpus or (report.corpus, worker)
    if report.corpus != corpus[0]:
        raise CommitLogError(f"workers {corpus[1]} and {worker} read different texts, or know other costs of samples; "
                             "give every node the same [training] and data")
    step.change(live=state.live.adding(worker, Present(report.addresses)), corpus=corpus,
                lost=state.lost.without(worker))
    if isinstance(state.phase, Rejoining):
        step.change(phase=state.phase.ready(worker, report.known, step.at))


def _ran(step: Step, reports: Sequence[Ran]) -> None:
    """Handle reports of members that have stepped an iteration, and acknowledge them.

    An acknowledgement lets a member continue or tells it to stop where all members stop. A member that runs no
    micro-batch sends nothing that other members wait for. The others are therefore not acknowledged before it has
    reported, too, so that no member is more than one step ahead of the last committed iteration.
    """
    compared = step.state.log.difference
    _commit(step, *step.state.log.ran(*reports))
    if (difference := step.state.log.difference) is not None:
        if compared is None:
            _differ(step, difference)
        return  # no member steps the next iteration without an acknowledgement: this one can be undone
    state, phase = step.state, step.state.phase
    current_reports = [report for report in reports if isinstance(phase, Training) and report.order == state.order
                       and report.worker in state.members]
    if len(current_reports) < len(reports):
        for report in reports:
            if report not in current_reports:
                step.send((report.worker,), Acknowledged(report.order, report.iteration))
    if not current_reports:
        return
    assert isinstance(phase, Training)
    answered: Sequence[Ran] = current_reports
    if phase.without_microbatches:
        answered, unanswered = [], list(phase.unanswered)
        for report in current_reports:
            unanswered.append(report)
            if state.log.have_reported(phase.without_microbatches, report.iteration):
                answered, unanswered = [*answered, *unanswered], []
        step.change(phase=replace(phase, unanswered=tuple(unanswered)))
    by_iteration: dict[int, list[Worker]] = {}
    for report in answered:
        by_iteration.setdefault(report.iteration, []).append(report.worker)
    for iteration, workers in by_iteration.items():
        step.send(workers, Acknowledged(
            state.order, iteration, stop=iteration + 1 == phase.stop_before, save=iteration + 1 == phase.save_before,
            committed=state.log.last))


def _commit(step: Step, log: CommitLog, committed: Iterable[Committed]) -> None:
    step.change(log=log)
    for iteration in committed:
        step.do(iteration)
        state = step.state
        step.change(recovery=state.recovery.committed(step.at), slow=state.slow.committed(iteration))


def _differ(step: Step, difference: Difference) -> None:
    """Handle copies that differ: give up wrong members, and go back if committed iterations may be affected.

    Raises RunError if none is known to be wrong, and the run has gone back for this before without progress.
    """
    why = str(difference)
    if not difference.wrong and difference.iteration <= step.state.doubted:
        raise RunError(f"{why}, and they did before the run went back: their hardware, or libraries, compute otherwise")
    step.do(Noted(text=why))
    step.change(recovery=step.state.recovery.broke(why, step.at), faulty=difference.wrong)
    if difference.spread:
        step.change(doubt=why, doubted=step.state.doubted if difference.wrong else difference.iteration)
    orders.end(step, doubted=difference.spread)


def _started(step: Step, report: Started) -> None:
    """Handle a member that begins its first op in the current order; the last one ends a recovery."""
    state = step.state
    if not isinstance(state.phase, Training) or report.order != state.order or state.phase.ended:
        return  # a late report of an order that another recovery has ended
    started = state.phase.started.adding(report.worker, None)
    step.change(phase=replace(state.phase, started=started))
    if len(started) < len(state.members):
        return
    step.change(recovery=state.recovery.end(state.log.next_iteration, len(state.members), step.at))
    if len(step.state.recovery.recoveries) > len(state.recovery.recoveries):
        recovery = step.state.recovery.recoveries[-1]
        step.do(Resumed(pause=round(recovery.seconds, 3), live=recovery.live))
        step.do(recovery)


def _paused(step: Step, report: Paused) -> None:
    """Handle a member that has paused. If it paused because of an error, the order ends for all members."""
    if report.validated is not None:
        _commit(step, *step.state.log.validated(report.order, report.validated))
    state, worker = step.state, report.worker
    if report.order != state.order or worker not in state.members or worker in state.paused:
        return
    step.change(paused=state.paused.adding(worker, report.kept))
    if report.reason is not None:
        if isinstance(state.phase, Training) and not state.phase.ended:
            step.change(recovery=state.recovery.broke(
                f"worker {worker} lost a connection, {report.reason}", step.at))
        orders.end(step)


def _finished(step: Step, report: Finished) -> None:
    """Handle a member that has written its parameters or its part of a checkpoint. The last one ends the order."""
    state = step.state
    if not isinstance(state.phase, Finishing) or report.order != state.order or report.worker not in state.members:
        return
    finished = state.phase.finished.adding(report.worker, None)
    step.change(log=state.log.finished(report), phase=replace(state.phase, finished=finished))
    if len(finished) == len(state.members) and not next_order.saved_for_leaving(step):
        orders.leave(step)


def _lost(step: Step, event: Lost) -> None:
    state, worker = step.state, event.worker
    was_member = worker in state.members
    layers = step.rules.placement.held(state.current, worker) if worker in state.current.seat_of \
        else frozenset[int]()
    step.change(lost=state.lost.adding(worker, Loss(event.reason, layers)))
    step.forget([worker])
    if not was_member:
        step.do(Noted(text=f"{event.reason}, before it took part"))
        return
    next_order.enter_losses(step, [(worker, event.reason)], event.since)
    next_order.enter_nodes(step, [worker])
    orders.end(step)
    if isinstance(step.state.phase, Finishing):
        step.change(phase=replace(step.state.phase, outdated=True))


def _leaving(step: Step, worker: Worker) -> None:
    """Handle a worker that received a signal to end. A member stays until the next iteration boundary, so that the
    others can continue without it. If no worker would remain, the run ends there with a checkpoint."""
    state = step.state
    if isinstance(state.phase, Training | Finishing) and worker in state.members:
        step.change(leaving=state.leaving | {worker})
    elif isinstance(state.phase, Rejoining | Gathering | Training):
        step.forget([worker])  # its order has not been given yet
        step.send((worker,), Leave())


def _take_over(step: Step, phase: Rejoining) -> None:
    """Continue with the workers of a dead coordinator, as if they had just paused."""
    result = phase.found()
    members = frozenset(result.kept)
    step.do(result)
    step.do(CoordinatorRestarted(live=len(members)))
    why = f"node 0 was started anew, and has found {len(members)} workers"
    state = step.state
    step.change(phase=Training(ended=True), order=result.order, members=members,
                paused=PersistentMap(result.kept.items()),
                log=state.log.take_over(result.losses, result.factor), recovery=state.recovery.broke(why, step.at))
    if result.doubted:
        step.change(doubt="copies differed, as workers have told the new node 0")
    reasons = [(worker, f"worker {worker} was not found by the new node 0") for worker in result.missing]
    step.change(lost=PersistentMap([*state.lost.items(), *((worker, Loss(reason)) for worker, reason in reasons)]))
    next_order.enter_losses(step, reasons, step.at)
    next_order.enter_nodes(step, result.missing)
