"""Does a schedule obey every rule? Decided from the schedule alone; nothing here knows how it was made.

One function a rule, in the visible lists below; they are in `schedules.rules`. Rules of a later tier take for granted
what the earlier ones establish, so checking stops after the first tier that finds something: a dropped op is reported
once, as dropped.

Pipelines that share no micro-batch with others and run the same programs at the same speed behave the same at every
instant, so one of them stands for all; the same holds for groups of pipelines that do share some. Cost is linear in the
ops of the *different* groups.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from slipstream.schedules.rules import programs, times, workers
from slipstream.schedules.rules.case import Case, Violation
from slipstream.schedules.schedule import Schedule

__all__ = ["MAX_VIOLATIONS", "TIERS", "Violation", "check"]

MAX_VIOLATIONS = 100
"""Reported per rule: a schedule with more is broken enough."""

Rule = Callable[[Case], Iterator[Violation]]
TIERS: tuple[tuple[Rule, ...], ...] = (
    (workers.live_workers, workers.roles, workers.holders),
    (programs.each_once, programs.closing, programs.reduced_together),
    (times.hosts, times.one_at_a_time, times.forward_order, times.backward_order, times.weight_order, times.memory,
     times.all_reduce, times.optimizer, times.period, times.bound),
    (times.deadlock,),
)
FORWARD_TIERS: tuple[tuple[Rule, ...], ...] = (
    (workers.live_workers, workers.roles, workers.holders),
    (programs.each_once, programs.only_forwards),
    (times.hosts, times.one_at_a_time, times.forward_order, times.period, times.bound),
    (times.deadlock,),
)
"""Those of forwards alone (`schedules.forwards`)."""


def check(schedule: Schedule, *, forwards: bool = False) -> list[Violation]:
    """Every violation of the first tier of rules that is broken; empty for a valid schedule.

    `forwards`: it is to have forwards alone, as validation runs them. At most MAX_VIOLATIONS a rule. The schedule must
    have the form that `schedules.codec` asks of a file: each index in it points at something.
    """
    case = Case(schedule, forwards)
    for tier in FORWARD_TIERS if forwards else TIERS:
        found = [violation for rule in tier for violation in islice(rule(case), MAX_VIOLATIONS)]
        if found:
            return found
    return []
