"""Transition: what each event changes, and what is decided then. A function of the state and the event alone.

The event loop calls it with each event, one after the other. An order for training ends when a member is lost or
reports an error, or before an iteration that is chosen for all to stop at (`iteration_boundary`). When all members that
are left have paused, and there is a schedule for them, the next order is given (`next_order`). It begins at the first
iteration that is not committed. An event that comes while a schedule is being planned only changes what is waited for.
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
"""Orders, one after the other, may end at once before anybody has begun, as where several die."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
"""From one such order to the next, from then on, each time twice as long: refused connections may have left threads."""


class Lost(NamedTuple):
    """A worker is gone."""

    worker: Worker
    reason: str
    since: float
    """By time.monotonic."""


class Reports(NamedTuple):
    """Workers have stepped, and their node has put their reports together."""

    reports: tuple[Ran, ...]


class Disconnected(NamedTuple):
    """The connection to a process of a worker has ended, so that it will be lost in a moment."""

    worker: Worker


class Stop(NamedTuple):
    """The run is to end at the next iteration, with a checkpoint."""


class Hurry(NamedTuple):
    """Where it is to end, it does not wait for the end of the iteration any more."""


class Look(NamedTuple):
    """Time has passed."""


_CHANGE_LITTLE = Ran, Reports, Validated, Started, Saved
"""Nothing follows from these before an iteration is committed."""
Event = ToCoordinator | Reports | ScheduleFound | SpeedsPlanned | Lost | Disconnected | Stop | Hurry | Look


def transition(rules: Rules, state: RunState, event: Event, at: float) -> tuple[RunState, list[Any]]:
    """The state after an event that happened at a time by time.monotonic, and the effects, in their order (`effects`).

    Raises RunError where there is no way to go on, CommitLogError where workers disagree, and NobodyLeftError.
    """
    step = Step(rules, state, at)
    _handle(step, event)
    if not _nothing_follows(state, step.state, event):
        _advance(step)
    return step.state, step.effects


def awaited(state: RunState) -> list[Worker]:
    """Those without whom the first order cannot be given."""
    if isinstance(state.phase, Rejoining):
        return sorted(state.phase.missing)
    return sorted(state.members.difference(state.live)) if isinstance(state.phase, Gathering) else []


def held(rules: Rules, state: RunState) -> Mapping[Worker, frozenset[int]]:
    """The layers that each member needs, once there is an order that is not done."""
    return state.held_now(rules.placement) if isinstance(state.phase, Training | Finishing) else {}


def _nothing_follows(before: RunState, state: RunState, event: Event) -> bool:
    """Whether there is nothing to decide: most events of a large run are such."""
    if isinstance(event, Paused):
        return not state.planning  # others still run
    if isinstance(event, Ready):
        return isinstance(state.phase, Rejoining)
    if not isinstance(event, _CHANGE_LITTLE):
        return False
    return before.log.next_iteration == state.log.next_iteration


def _advance(step: Step) -> None:
    """Do what has become possible. Raises RunError."""
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
    """When the next order may be given where one after the other ends before anybody has begun. By time.monotonic."""
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
        case Saved() if event.iteration < step.rules.iterations.stop:  # the last one costs no training
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
            # No order is given before it is lost. Workers that die together are then lost in one recovery, also those
            # that have paused before.
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
    """A worker waits for an order. Raises CommitLogError where it reads another text than others."""
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
    """Members have stepped: they are acknowledged, and go on or stop where all members will.

    Whoever runs no micro-batch passes nothing on that the others would wait for, so that these are not acknowledged
    before it has reported, too: nobody is more than one step ahead of the last committed iteration.
    """
    compared = step.state.log.difference
    _commit(step, *step.state.log.ran(*reports))
    if (difference := step.state.log.difference) is not None:
        if compared is None:
            _differ(step, difference)
        return  # nobody steps the next iteration before all reports are acknowledged: this one can be undone
    state, phase = step.state, step.state.phase
    mine = [one for one in reports if isinstance(phase, Training) and one.order == state.order
            and one.worker in state.members]
    if len(mine) < len(reports):
        for one in reports:
            if one not in mine:
                step.send((one.worker,), Acknowledged(one.order, one.iteration))
    if not mine:
        return
    assert isinstance(phase, Training)
    answered: Sequence[Ran] = mine
    if phase.without_microbatches:
        answered, unanswered = [], list(phase.unanswered)
        for one in mine:
            unanswered.append(one)
            if state.log.have_reported(phase.without_microbatches, one.iteration):
                answered, unanswered = [*answered, *unanswered], []
        step.change(phase=replace(phase, unanswered=tuple(unanswered)))
    by_iteration: dict[int, list[Worker]] = {}
    for one in answered:
        by_iteration.setdefault(one.iteration, []).append(one.worker)
    for iteration, workers in by_iteration.items():
        step.send(workers, Acknowledged(
            state.order, iteration, stop=iteration + 1 == phase.stop_before, save=iteration + 1 == phase.save_before,
            committed=state.log.last))


def _commit(step: Step, log: CommitLog, committed: Iterable[Committed]) -> None:
    step.change(log=log)
    for one in committed:
        step.do(one)
        state = step.state
        step.change(recovery=state.recovery.committed(step.at), slow=state.slow.committed(one))


def _differ(step: Step, difference: Difference) -> None:
    """Copies differ: who is known to be wrong is given up, and where numbers may rest on what is wrong, the run goes
    back. Raises RunError where it has gone back for that before, and has come no further."""
    why = str(difference)
    if not difference.wrong and difference.iteration <= step.state.doubted:
        raise RunError(f"{why}, and they did before the run went back: their hardware, or libraries, compute otherwise")
    step.do(Noted(text=why))
    step.change(recovery=step.state.recovery.broke(why, step.at), faulty=difference.wrong)
    if difference.spread:
        step.change(doubt=why, doubted=step.state.doubted if difference.wrong else difference.iteration)
    orders.end(step, doubted=difference.spread)


def _started(step: Step, report: Started) -> None:
    """A member begins its first op. The last one ends a recovery, where there is one."""
    state = step.state
    if not isinstance(state.phase, Training) or report.order != state.order or state.phase.ended:
        return  # it began late, in an order that another recovery has ended
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
    """A member has stopped; where that has a reason, the order ends for all."""
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
    """A member has written its parameters."""
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
    """A worker was told to end by somebody else. The others go on without it from the next iteration; where nobody
    would be left, the run ends there, with a checkpoint.
    """
    state = step.state
    if isinstance(state.phase, Training | Finishing) and worker in state.members:
        step.change(leaving=state.leaving | {worker})
    elif isinstance(state.phase, Rejoining | Gathering | Training):
        step.forget([worker])  # of an order that has not been given
        step.send((worker,), Leave())


def _take_over(step: Step, phase: Rejoining) -> None:
    """Go on with the workers of another coordinator, as if they had paused."""
    found = phase.found()
    members = frozenset(found.kept)
    step.do(found)
    step.do(CoordinatorRestarted(live=len(members)))
    why = f"node 0 was started anew, and has found {len(members)} workers"
    state = step.state
    step.change(phase=Training(ended=True), order=found.order, members=members,
                paused=PersistentMap(found.kept.items()),
                log=state.log.take_over(found.losses, found.factor), recovery=state.recovery.broke(why, step.at))
    if found.doubted:
        step.change(doubt="copies differed, as workers have told the new node 0")
    reasons = [(worker, f"worker {worker} was not found by the new node 0") for worker in found.missing]
    step.change(lost=PersistentMap([*state.lost.items(), *((worker, Loss(reason)) for worker, reason in reasons)]))
    next_order.enter_losses(step, reasons, step.at)
    next_order.enter_nodes(step, found.missing)
