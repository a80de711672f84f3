"""Orders: tells workers to train, to stop, to finish and to leave, and enters what was told."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

import msgspec

from slipstream.runtime.coordinator.context import CoordinatorContext
from slipstream.runtime.coordinator.join_planning import Join
from slipstream.runtime.coordinator.part_moves import AS_THEY_ARE
from slipstream.runtime.events import HandedOver, Joined, OrderGiven
from slipstream.runtime.model.state.parts import CutFor
from slipstream.runtime.protocol.to_worker import (
    KEPT_CONTENTS,
    NOTHING,
    Assigned,
    Content,
    EndOrder,
    Finish,
    LayerMove,
    Leave,
    PartMove,
    Train,
)
from slipstream.schedules.parts import Parts
from slipstream.schedules.schedule import COMPUTE_KINDS, Schedule, Worker

Address = tuple[str, int]


class Orders:
    """Gives the orders of one run."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context

    def train(self, schedule: Schedule, moves: tuple[LayerMove, ...], join: Join | None = None,
              part_moves: tuple[PartMove, ...] = (), restore: Mapping[Worker, tuple[int, ...]] | None = None,
              cut_for: CutFor = AS_THEY_ARE) -> None:
        """Train by a schedule from the first iteration that is not committed.

        The moves are made before, while all wait; `join` is what was fetched for it while all trained; `restore` are
        layers that workers read from the checkpoint of that iteration; `cut_for` says which parts of states stay.
        """
        context, state = self._context, self._context.state
        live = {seat.worker for seat in schedule.seats}
        first = context.log.next_iteration
        joining = live - state.members if state.number else set()
        context.recovery.ordered(live - state.members, settled=join is not None and join.settles,
                                 meanwhile=first - join.began if join is not None and join.fetch else 0)
        told = state.everyone
        decision = context.slow.decision
        slow = set(decision.left_out) if decision is not None and decision.schedule is schedule else set()
        state.ready = (state.everyone - slow) - live  # whoever has nothing to do waits to join again
        state.members, state.paused, state.holds, state.kept = live, set(), {}, {}
        settles = schedule is not state.current  # else parts of optimizer states alone have been cut anew
        state.phase, state.current, state.ended, state.began = "training", schedule, False, first
        state.cut_for = cut_for
        state.stop_before = state.save_before = state.new_costs = None
        state.without_microbatches, state.unanswered = _without_microbatches(schedule), []
        state.number += 1
        self._begins(schedule, join if settles else None)
        text, parts = context.schedules.prepared(schedule)
        self._assign(parts)
        context.tell(told, Train(
            number=state.number, first_iteration=first, moves=moves, fetch=0 if join is None else join.fetch,
            part_moves=part_moves, cut_for=tuple((layers, tuple(members)) for layers, members in cut_for.items()),
            addresses=self._addresses((*moves, *part_moves)), failed=parts.failed,
            schedule=msgspec.Raw(text) if context.whole_schedules else NOTHING,
            stand_for=tuple((worker, state.stand_for[worker]) for worker in sorted(live)
                            if state.stand_for.get(worker, 1) > 1),
            costs=None if context.costs is None else context.costs.current,
            factor=context.log.factor, restore=None if restore is None else tuple(restore.items())))
        self._record(schedule, text, joining, join)

    def _assign(self, parts: Parts) -> None:
        """Tell each member what it does, and before that, what it needs to know for it and does not yet."""
        context, state = self._context, self._context.state
        lacking: dict[str, list[Worker]] = defaultdict(list)
        for worker, share in parts.shares.items():
            known = state.contents.setdefault(worker, deque(maxlen=KEPT_CONTENTS))
            for digest in share.contents:
                if digest not in known:
                    known.append(digest)
                    lacking[digest].append(worker)
        for digest, workers in lacking.items():
            context.tell(workers, Content(digest, msgspec.Raw(parts.contents[digest])))
        for worker, share in parts.shares.items():
            context.send(worker, Assigned(state.number, share))

    def end(self) -> None:
        """Have all members stop where they are."""
        state = self._context.state
        if not state.ended:
            state.ended = True
            self._context.tell(state.members, EndOrder(state.number))

    def finish(self) -> None:
        """All iterations are committed, or all or some are to end here; the first holder of each layer writes it."""
        context, state = self._context, self._context.state
        writers = {layer: worker for worker, layers in sorted(state.holds.items(), reverse=True)
                   for layer in sorted(layers)}
        partition = context.partition
        part_moves = () if partition is None else partition.to_writers(writers, state.kept)
        state.phase, state.outdated = "finishing", False
        if not state.leaving:
            context.slow.over(context.log.next_iteration)
        state.finished.clear()
        state.number += 1
        context.log.begin(state.number, state.members)
        context.tell(state.members, Finish(
            number=state.number, first_iteration=context.log.next_iteration, writers=tuple(writers.items()),
            factor=context.log.factor, part_moves=part_moves, addresses=self._addresses(part_moves),
            parameters=context.log.next_iteration >= context.iterations.stop))

    def _addresses(self, moves: Iterable[LayerMove | PartMove]) -> tuple[tuple[Worker, tuple[Address, ...]], ...]:
        """Where the sources listen."""
        addresses = self._context.state.addresses
        return tuple((source, addresses[source]) for source in sorted({move.source for move in moves}))

    def leave(self, why: str | None = None) -> None:
        """The workers end: everything is done, or cannot be any more, although the run was told to end well."""
        if why is not None:
            self._context.listeners.note(f"{why}: the run, which was told to end, ends without another checkpoint")
        self._context.tell_all(Leave())
        self._context.state.phase = "left"

    def _begins(self, schedule: Schedule, join: Join | None) -> None:
        """An order has a number: all who watch the run begin anew with it."""
        context, state = self._context, self._context.state
        context.joins.close()
        context.schedules.forget()
        if context.settler is not None and join is not None:
            context.settler.close(state.number, join.speeds)
        context.log.begin(state.number, state.members)
        context.checkpoints.order_begins()
        context.slow.order_begins(state.number, schedule, context.log.next_iteration)

    def _record(self, schedule: Schedule, text: bytes, joining: set[Worker], join: Join | None) -> None:
        """Enter an order that has been given. `joining` are the workers that did not take part before."""
        number, events = self._context.state.number, self._context.events
        if join is not None:
            events.write(HandedOver(fetch=join.fetch, order=number))
        for worker in sorted(joining):
            events.write(Joined(worker=worker, stands_for=self._context.state.stand_for.get(worker, 1)))
        whole = len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns
        moved = any(map(schedule.holds_others, schedule.seats))
        events.write(OrderGiven(
            order=number, schedule=events.keep(text), live=len(schedule.seats),
            planned_period=round(schedule.seconds(schedule.period_ticks), 9),
            phase="settled" if moved else "whole" if whole else "at once"))


def _without_microbatches(schedule: Schedule) -> frozenset[Worker]:
    idle = {number for number, program in enumerate(schedule.programs)
            if not any(op.kind in COMPUTE_KINDS for op in program)}
    return frozenset(seat.worker for seat in schedule.seats if seat.program in idle)
