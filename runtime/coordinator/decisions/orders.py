"""Orders: messages that make workers train, stop, finish or leave, and the matching changes of the state."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.join_planning import Join
from slipstream.runtime.coordinator.decisions.part_moves import AS_THEY_ARE
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.run_state import Finishing, Left, Step, Training
from slipstream.runtime.events import HandedOver, Joined, Noted, OrderGiven
from slipstream.runtime.model.state.parts import CutFor
from slipstream.runtime.protocol.to_worker import (
    KEPT_CONTENTS,
    NOTHING,
    Assigned,
    Content,
    EndOrder,
    Finish,
    Leave,
    Move,
    Train,
)
from slipstream.schedules.parts import Parts
from slipstream.schedules.schedule import COMPUTE_KINDS, Schedule, Worker

DIGEST_LENGTH = 16

def train(step: Step, schedule: Schedule, moves: tuple[Move, ...], join: Join | None = None, *,
          restore: Mapping[Worker, tuple[int, ...]] | None = None, cut_for: CutFor = AS_THEY_ARE) -> None:
    """Order training by a schedule from the first iteration that is not committed.

    Members make the `moves` before the first op, while all wait. `join` describes the layers that were fetched for this
    order while all trained. `restore` maps workers to the layers that they read from the checkpoint of the first
    iteration. `cut_for` names ranges of layers that keep the partition among their former members.
    """
    before, rules = step.state, step.rules
    live, first, order = frozenset(schedule.seat_of), before.log.next_iteration, before.order + 1
    nobody_started = isinstance(before.phase, Training) and before.phase.ended and not before.phase.started
    recipients, slow = before.everyone, before.slow.order_begins(order, schedule, first, step)
    settler = step.state.settler
    settles = join is not None and schedule is not before.current  # otherwise only parts of optimizer state move
    if settler is not None and join is not None and settles:
        settler = replace(settler, closed=(order, join.speeds))
    step.change(
        current=schedule, members=live, order=order, paused=PersistentMap(), cut_for=cut_for, answers={},
        vain=before.vain + 1 if nobody_started else 0,
        phase=Training(began=first, without_microbatches=_without_microbatches(schedule)),
        recovery=before.recovery.ordered(
            live - before.members, at=step.at, settled=join is not None and join.settles,
            meanwhile=first - join.began if join is not None and join.fetch else 0),
        joins=before.joins.close(step), settler=settler, log=before.log.begin(order, live),
        checkpoints=before.checkpoints.order_begins(step.at), slow=slow)
    text, parts = rules.prepared(schedule)
    _assign(step, parts)
    step.send(sorted(recipients), Train(
        order=order, first_iteration=first, moves=moves, fetch=0 if join is None else join.fetch,
        cut_for=tuple((layers, tuple(members)) for layers, members in cut_for.items()),
        addresses=step.state.addresses(moves), failed=parts.failed,
        schedule=msgspec.Raw(text) if rules.whole_schedules else NOTHING,
        factor=step.state.log.factor,
        restore=None if restore is None else tuple(restore.items())))
    if join is not None:
        step.do(HandedOver(fetch=join.fetch, order=order))
    for worker in sorted(live - before.members) if before.order else ():
        step.do(Joined(worker=worker))
    whole = len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns
    moved = any(map(schedule.holds_others, schedule.seats))
    step.do(OrderGiven(
        order=order, schedule=digest_of(text), live=len(live),
        planned_period=round(schedule.seconds(schedule.period_ticks), 9),
        phase="settled" if moved else "whole" if whole else "at once"))


def digest_of(schedule: bytes) -> str:
    """Return the digest by which events name a schedule, given as the contents of its file."""
    return hashlib.sha256(schedule).hexdigest()[:DIGEST_LENGTH]


def _assign(step: Step, parts: Parts) -> None:
    """Send each member its share of the schedule, and before it any schedule contents that the member lacks."""
    lacking: dict[str, list[Worker]] = defaultdict(list)
    live = dict(step.state.live)
    for worker, share in parts.shares.items():
        known_contents = live[worker].contents
        unknown = [digest for digest in dict.fromkeys(share.contents) if digest not in known_contents]
        live[worker] = replace(live[worker], contents=(*known_contents, *unknown)[-KEPT_CONTENTS:])
        for digest in unknown:
            lacking[digest].append(worker)
    step.change(live=PersistentMap(live.items()))
    for digest, workers in lacking.items():
        step.send(sorted(workers), Content(digest, msgspec.Raw(parts.contents[digest])))
    for worker, share in parts.shares.items():
        step.send((worker,), Assigned(step.state.order, share))


def end(step: Step, *, doubted: bool = False) -> None:
    """End the current order: tell all members to stop at once. If copies of state differ (`doubted`), tell them even if
    the order has already ended, because another coordinator may have to learn it from them."""
    state = step.state
    if isinstance(state.phase, Training) and (doubted or not state.phase.ended):
        step.change(phase=replace(state.phase, ended=True))
        step.send(sorted(state.members), EndOrder(state.order, doubted))


def finish(step: Step) -> None:
    """Order the members to write the final parameters, or a checkpoint if the run or some members end early."""
    state, rules, holders = step.state, step.rules, defaultdict[int, list[Worker]](list)
    for worker, layers in sorted(state.holds.items()):
        for layer in layers:
            holders[layer].append(worker)
    writers = {layer: workers[layer % len(workers)] for layer, workers in sorted(holders.items())}
    moves = rules.partition.to_writers(writers, state.paused)
    order, first = state.order + 1, state.log.next_iteration
    step.change(phase=Finishing(), order=order, log=state.log.begin(order, state.members),
                slow=state.slow if state.leaving else state.slow.over(first, step))
    step.send(sorted(state.members), Finish(
        order=order, first_iteration=first, writers=tuple(writers.items()), factor=step.state.log.factor,
        moves=moves, addresses=state.addresses(moves), parameters=first >= rules.iterations.stop))


def leave(step: Step, why: str | None = None) -> None:
    """Tell all workers to leave, and end the run; `why` is the reason if it must end without a checkpoint."""
    if why is not None:
        step.do(Noted(text=f"{why}: the run, which was told to end, ends without another checkpoint"))
    step.send(sorted(step.state.live), Leave())
    step.change(phase=Left())


def _without_microbatches(schedule: Schedule) -> frozenset[Worker]:
    idle = {number for number, program in enumerate(schedule.programs)
            if not any(op.kind in COMPUTE_KINDS for op in program)}
    return frozenset(seat.worker for seat in schedule.seats if seat.program in idle)
