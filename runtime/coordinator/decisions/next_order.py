"""Next order: chooses what follows when all remaining members have paused."""

from collections.abc import Collection, Iterable

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import checkpoint_rollback, lost_workers, orders
from slipstream.runtime.coordinator.decisions.effects import GiveUp
from slipstream.runtime.coordinator.decisions.lost_workers import Loss
from slipstream.runtime.coordinator.decisions.part_moves import AS_THEY_ARE
from slipstream.runtime.coordinator.decisions.questions import PlannerFailedError
from slipstream.runtime.coordinator.decisions.run_state import Gathering, Step, Training
from slipstream.runtime.coordinator.decisions.schedule_choice import at_first, at_once
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import Failed, NodeLost
from slipstream.runtime.protocol.to_worker import Leave, Move
from slipstream.schedules.schedule import NoScheduleError, Schedule, Worker


def give(step: Step) -> None:
    """Give the next order, or request its schedule, whose answer leads to another call. Raises RunError."""
    if _give_up_faulty(step):
        return
    state, stop = step.state, step.rules.iterations.stop
    first = state.log.next_iteration
    untouched = first == step.rules.iterations.start
    missing = [] if untouched else step.lost_layers(state.paused)
    if missing or not state.everyone:
        step.change(slow=state.slow.take_back(state.slow.left_out))
    everyone = step.state.everyone
    if missing:
        checkpoint_rollback.give_order(step, checkpoint_rollback.why_lost(step, missing[0]))
    elif state.doubt is not None:
        checkpoint_rollback.give_order(step, state.doubt)
    elif not everyone:
        why = f"no worker is left: {lost_workers.reasons(state.lost)}"
        if not state.stopping:
            raise RunError(why)
        orders.leave(step, why)
    elif not state.leaving or first >= stop or _release(step, untouched):
        if step.state.stopping and untouched:
            orders.leave(step)
        elif (first >= stop or step.state.stopping) and not isinstance(state.phase, Gathering):
            orders.finish(step)
        else:
            _train(step, untouched)


def _give_up_faulty(step: Step) -> bool:
    """Give up members whose copies are wrong; return whether there are any. They count as not paused, so that no order
    is given before they are lost."""
    faulty = [worker for worker in step.state.faulty if worker in step.state.members]
    step.change(faulty=(), paused=step.state.paused.without(*faulty))
    for worker in faulty:
        step.do(GiveUp(worker, f"worker {worker} held other copies than most"))
    return bool(faulty)


def enter_losses(step: Step, reasons: Iterable[tuple[Worker, str]], since: float) -> None:
    """Record the losses of members, which happened at `since` (`time.monotonic`). Members that share a machine and are
    lost together count as one failure."""
    for worker, reason in reasons:
        state, together = step.state, step.rules.domains.together(worker)
        if state.settler is not None and not any(other in together for other in state.recovery.dead):
            step.change(settler=replace(state.settler, failures=state.settler.failures + 1))
        step.change(recovery=state.recovery.lost(worker, reason, since))
        step.do(Failed(worker=worker, reason=reason))


def enter_nodes(step: Step, lost: Iterable[Worker]) -> None:
    """Record the loss of each node whose last connected workers are among the `lost` ones."""
    domains = step.rules.domains
    for node, workers in {domains.number(worker): domains.together(worker) for worker in lost}.items():
        if node is not None and len(workers) > 1 and not any(worker in step.state.live for worker in workers):
            step.change(recovery=step.state.recovery.node_lost(node))
            step.do(NodeLost(node=node, workers=workers))


def saved_for_leaving(step: Step) -> bool:
    """Release leaving members if the last order saved the layers that only they held; return whether it did.

    The remaining members go back to the checkpoint that was saved. If the result is False, the run is complete.
    """
    state = step.state
    if not state.leaving or state.stopping or state.log.next_iteration >= step.rules.iterations.stop:
        return False
    step.change(phase=Training(ended=True))
    _let_go(step)
    return True


def _train(step: Step, untouched: bool) -> None:
    state, partition = step.state, step.rules.partition
    join = None if untouched else state.joins.current
    schedule = join.schedule if join is not None else _for_speeds(step) or _next_schedule(step, untouched)
    if schedule is None:
        return
    moves, stay = tuple[Move, ...](), AS_THEY_ARE
    if not untouched:
        if join is None:
            stay = partition.left(schedule, state.current, state.cut_for, state.paused)
        moves = partition.moves(schedule, state.paused, state.log.next_iteration - 1,
                                () if join is None else join.moves, cut_for=stay)
    orders.train(step, schedule, moves, join, cut_for=stay)


def _release(step: Step, untouched: bool) -> bool:
    """Release members that received a signal to end, and return whether the next order can be given.

    The result is False while a schedule without these members is being planned, or while layers that only they hold are
    being saved. If no member would remain, or no schedule exists for the remaining ones, the whole run is stopped
    instead.
    """
    state = step.state
    staying = state.members - state.leaving
    if state.stopping or state.leaving.issuperset(state.live):
        step.change(stopping=True)
        return True
    if not untouched and step.lost_layers(staying):
        orders.finish(step)
        return False
    try:
        if _schedule_of(step, staying, untouched) is None:
            return False
    except (NoScheduleError, RunError):
        step.change(stopping=True)
        return True
    _let_go(step)
    return True


def _let_go(step: Step) -> None:
    leaving, lost = sorted(step.state.leaving), step.state.lost
    reasons = {worker: f"worker {worker} has left, as it was told to" for worker in leaving}
    for worker, reason in reasons.items():
        lost = lost.adding(worker, Loss(reason, step.state.holds.get(worker, frozenset())))
    step.send(leaving, Leave())
    step.change(lost=lost)
    step.forget(leaving)
    enter_losses(step, reasons.items(), step.at)


def _for_speeds(step: Step) -> Schedule | None:
    """Return the schedule chosen for the measured speeds; None if there is none or members have changed since."""
    decision = step.state.slow.decision
    if decision is None or decision.schedule is None or \
            step.state.members != {*decision.schedule.seat_of, *decision.left_out}:
        return None
    return decision.schedule


def _next_schedule(step: Step, untouched: bool) -> Schedule | None:
    """Return the schedule of the next order if no layers have been fetched for it; None if it is still being planned.

    A waiting worker that lacks its layers is left out; it fetches them while the others train. Before the first step of
    the run there is nothing to fetch. If the current members cannot train without the waiting worker, all wait until it
    has its layers.
    """
    state = step.state
    if not untouched and state.members and state.ready:
        try:
            return _schedule_of(step, state.members, untouched)
        except (NoScheduleError, RunError):
            pass
    try:
        return _schedule_of(step, state.everyone, untouched)
    except PlannerFailedError:
        raise  # not a RunError: a restarted coordinator asks the planner again
    except NoScheduleError as error:
        raise RunError(", and ".join(filter(None, (lost_workers.reasons(state.lost), str(error))))) from None


def _schedule_of(step: Step, live: Collection[Worker], untouched: bool) -> Schedule | None:
    return at_first(step, live) if untouched else at_once(step, live)
