"""`check --bound` is no witness of a lie.

Each value that a bound reads is changed to help one.

For each kind of plan there is a file whose plan is longer than another plan of the same question.
It claims a bound that the other plan disproves. Then each value of the file but its ops is changed
in turn, in the files of both plans. The claim must be found wrong, unless the change makes another
job of it, for which the shorter plan is none.
"""

import json
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.planner.blockwise import Blocks
from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.budget import Budget
from slipstream.planner.job.file import parse_job
from slipstream.planner.normalise import normalised
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import BlockParams, SearchParams
from slipstream.planner.placement import find_placement
from slipstream.planner.plan import plan_only
from slipstream.planner.recompute import choose_recomputation
from slipstream.planner.stated_question import LAYER_COST_RULES, ContradictionError, narrowest_scope
from slipstream.schedules import codec
from slipstream.schedules.check import check
from slipstream.schedules.schedule import LayerCosts, OpKind, ProgramOp, Schedule, Scope, Worker
from tests.jobs import grid

STEPS = 30_000
OPS = {"programs", "seats", "slices"}
"""Fields that are the plan itself, or are checked with it."""
OF_THE_PLAN = {"job", "tick_seconds", "period_ticks", "lower_bound_ticks", "status", "method"}
"""Fields of a plan's length and claims.

`check` compares them with the ops, names and units.
"""
LAYERS = "[placement]\nlayers = {}\n"
MEMORY = "[memory]\ncapacity = {}\nactivation = 1\nweight_stash = 1\n"
NETWORK = "[network]\noverlap = true\n"
ONE = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"
ALL_REDUCE = f"{ONE}optimizer = 1\nall_reduce = 2\ntransfer = 1\n"
UNEQUAL = "forward = [1, 5]\nbackward_input = [1, 5]\nbackward_weight = [1, 5]\noptimizer = 1\n"


def planned(job, down=(), **options):
    return plan_only(
        PlanOptions(steps=STEPS, **options), job, [Worker.parse(name) for name in down]
    ).schedule


def in_blocks(monkeypatch):
    monkeypatch.setattr("slipstream.planner.plan.choose_blocks", lambda *_, **__: Blocks(2, 0.1))
    return planned(
        grid(1, 2, 6, more=MEMORY.format(3)),
        params=SearchParams(blocks=BlockParams(largest_moved=0)),
    )


def placed():
    text = (
        "pipelines = 1\nstages = 2\nmicrobatches = 3\n"
        "[time]\nforward = [2, 4]\nbackward_input = [2, 4]\n"
        "backward_weight = [2, 4]\noptimizer = [1, 2]\n"
        + LAYERS.format([2, 4])
        + MEMORY.format([9, 12])
        .replace("activation = 1", "activation = [2, 4]")
        .replace("weight_stash = 1", "weight_stash = [2, 4]")
    )
    return find_placement(text, PlanOptions(steps=10 * STEPS)).plan.schedule


def recomputed():
    job = parse_job(
        "pipelines = 1\nstages = 2\nmicrobatches = 4\n[time]\nforward = 1\nbackward_input = 1\n"
        "backward_weight = 1\n"
        + MEMORY.format(2)
        + "recomputed = 0.5\n[training]\nrecompute = 'auto'\n"
    )
    chosen = choose_recomputation(job, PlanOptions(steps=STEPS))
    return planned(chosen.job)


KINDS = {
    "linear": lambda: planned(grid(1, 3, 3, more=MEMORY.format(2))),
    "re-routed": lambda: planned(
        grid(2, 2, 4, more=LAYERS.format([2, 2]) + MEMORY.format(4)), ["0.1"]
    ),
    "whole stages": lambda: planned(grid(2, 2, 3), ["0.1"], slices=False),
    "fused": lambda: planned(grid(1, 2, 4), backward="fused"),
    "synchronous": lambda: planned(grid(1, 2, 4, times=ALL_REDUCE), optimizer="synchronous"),
    "roles moved": lambda: (
        normalised(
            grid(3, 2, 6), [Worker(0, 0), Worker(1, 0)], PlanOptions(steps=10 * STEPS)
        ).schedule
    ),
    "any layers": lambda: planned(
        grid(1, 2, 3, times=UNEQUAL, more=LAYERS.format([1, 5])), layers="move"
    ),
    "any layers, one down": lambda: planned(
        grid(2, 2, 3, more=LAYERS.format([2, 2]) + MEMORY.format(6) + "weights = 2\n"),
        ["0.0"],
        layers="move",
    ),
    "any placement": placed,
    "V": lambda: planned(
        grid(1, 2, 4, times=ALL_REDUCE, more="[placement]\norder = 'v'\nchunks = 2\n")
    ),
    "interleaved": lambda: planned(
        grid(2, 2, 2, more="[placement]\norder = 'interleaved'\nchunks = 2\n"), ["1.0"]
    ),
    "bidirectional": lambda: planned(grid(1, 2, 4, more="[placement]\norder = 'bidirectional'\n")),
    "overlapped": lambda: planned(
        grid(2, 2, 3, times=ALL_REDUCE, more=LAYERS.format([2, 2]) + NETWORK)
    ),
    "overlapped, any layers": lambda: planned(
        grid(2, 2, 3, times=ALL_REDUCE, more=LAYERS.format([2, 2]) + NETWORK),
        ["0.0"],
        layers="move",
    ),
    "recomputed": recomputed,
    "slow, with rooms": lambda: planned(
        grid(
            2,
            2,
            3,
            times=ALL_REDUCE + "slow = {'0.1' = 2}\n",
            more=LAYERS.format([2, 2]) + MEMORY.format(4) + "capacity_of = {'1.0' = 2}\n",
        )
    ),
}


@pytest.fixture(scope="module")
def files():
    """The plan of each kind, made once."""
    schedules_by_kind: dict[str, Schedule] = {}
    return lambda kind: (
        schedules_by_kind[kind]
        if kind in schedules_by_kind
        else schedules_by_kind.setdefault(kind, KINDS[kind]())
    )


def delayed(schedule: Schedule, ticks: int) -> Schedule:
    """The plan with everything from the middle on later.

    It is a longer plan of the same question.
    """
    middle = schedule.period_ticks // 2
    programs = []
    for program in schedule.programs:
        ops = []
        for op in program:
            start = op.start_ticks + ticks * (op.start_ticks >= middle)
            ops.append(ProgramOp(op.kind, op.slice, op.microbatch, start, op.pipeline))
        programs.append(tuple(ops))
    return _measured(replace(schedule, programs=tuple(programs)))


def _measured(schedule: Schedule) -> Schedule:
    """The plan with the period that it has, and no claim."""
    windows = {
        seat.worker: (ops[0].start_ticks, ops[-1].end_ticks)
        for seat in schedule.seats
        for ops in [schedule.ops(seat.worker)]
    }
    start = min(start for start, _ in windows.values())
    if schedule.optimizer == "synchronous":
        period = max(end for _, end in windows.values()) - start
    else:
        period = max(end - own_end for own_end, end in windows.values())
    return replace(
        schedule,
        period_ticks=period,
        lower_bound_ticks=0,
        status="feasible" if period else "optimal",
    )


def claiming(schedule: Schedule, ticks: int) -> Schedule:
    return replace(
        schedule,
        lower_bound_ticks=ticks,
        status="optimal" if ticks == schedule.period_ticks else "feasible",
    )


# --- Changes of every value of a struct, by its type ----------------------------------------------


Path = tuple[str | int, ...]


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Every value within a struct, with the fields and indices that lead to it."""
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            if path or name not in OPS | OF_THE_PLAN:
                yield from leaves(getattr(value, name), (*path, name))
    elif isinstance(value, tuple) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def with_value(value: Any, path: Path, new: object) -> Any:
    if not path:
        return new
    first, *rest = path
    if isinstance(first, str):
        return replace(value, **{first: with_value(getattr(value, first), tuple(rest), new)})
    items = list(value)
    items[first] = with_value(items[first], tuple(rest), new)
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def choices(schedule: Schedule, path: Path) -> tuple[object, ...]:
    """Other values of a field, by its annotation.

    It is one of a few words, or may be absent.
    """
    kind: Any = Schedule
    for step in path:
        if isinstance(step, str):
            kind = get_type_hints(kind)[step]
            structs = [
                option
                for option in get_args(kind)
                if isinstance(option, type) and issubclass(option, msgspec.Struct)
            ]
            if structs and get_origin(kind) in (Union, UnionType):
                kind = structs[0]
        else:
            return ()
    if get_origin(kind) is Literal:
        return get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Scope):
        return tuple(kind)
    return tuple(
        choice
        for option in get_args(kind)
        for choice in (
            (True, False)
            if option is bool
            else tuple(Scope)
            if option is Scope
            else (msgspec.UNSET,)
            if option is msgspec.UnsetType
            else (None,)
            if option is type(None)
            else ()
        )
    )


def changed(schedule: Schedule, path: Path, value: object) -> Iterator[Schedule]:
    """The schedule with each other value tried at a place."""
    others: list[object] = [choice for choice in choices(schedule, path) if choice != value]
    if isinstance(value, int) and not isinstance(value, bool):
        others += sorted(
            {0, value - 1, value + 1, value // 2, value * 3 // 2, 2 * value, 10 * value + 1}
            - {value, -1}
        )
    elif isinstance(value, float):
        others += [value / 2, 2 * value]
    elif (
        not others and value not in ((), None, msgspec.UNSET) and not isinstance(value, bool | str)
    ):
        raise AssertionError(f"{path}: no change is known for {value!r}")
    for other in others:
        yield with_value(schedule, path, other)


def changed_together(schedule: Schedule) -> Iterator[tuple[Path, Schedule]]:
    """All numbers of one field, or of one struct, at once: longer, or shorter."""
    groups: dict[Path, list[tuple[Path, int]]] = {}
    for path, value in leaves(schedule):
        if isinstance(value, int) and not isinstance(value, bool):
            names = tuple(step for step in path if isinstance(step, str))
            for group in {names, names[:-1]}:
                groups.setdefault(group, []).append((path, value))
    for group, members in groups.items():
        for numerator, denominator in ((3, 2), (2, 1), (1, 2), (0, 1)):
            longer = schedule
            for path, value in members:
                longer = with_value(longer, path, value * numerator // denominator)
            yield group, longer


# --- The witness ----------------------------------------------------------------------------------


def is_accepted(schedule: Schedule, budget: Budget | None = None) -> bool:
    """Return whether `check --bound` exits 0 for the file of a schedule.

    It runs without CP-SAT unless it has a budget.
    """
    try:
        read = codec.decode(codec.encode(schedule))
        return not check(read) and proven_bound(read, budget).ticks >= read.lower_bound_ticks
    except (codec.ScheduleError, ContradictionError):
        return False


def is_answer(schedule: Schedule, scope: Scope) -> bool:
    """Whether a plan is one of those that the bound of a file is about."""
    try:
        codec.decode(codec.encode(schedule))
    except codec.ScheduleError:
        return False
    return not check(schedule) and scope.is_valid_for(narrowest_scope(schedule))


def believed_lies(short: Schedule, path: Path, changes: Iterator[Schedule]) -> Iterator[str]:
    long = delayed(short, max(2, short.period_ticks // 4))
    for change in changes:
        lie = replace(change, programs=long.programs, period_ticks=long.period_ticks)
        for schedule in (_measured(lie), lie):
            for claim in {short.period_ticks + 1, schedule.period_ticks}:
                false = claiming(schedule, claim)
                if claim <= schedule.period_ticks and is_accepted(false):
                    truth = _measured(replace(change, programs=short.programs))
                    if truth.period_ticks < claim and is_answer(truth, false.scope):
                        yield f"{path}: {claim} is believed, {truth.period_ticks} is possible"


@pytest.mark.parametrize("kind", [*KINDS, "in blocks"])
def test_no_change_of_a_value_makes_the_witness_believe_a_lie(kind, files, monkeypatch):
    short = in_blocks(monkeypatch) if kind == "in blocks" else files(kind)
    assert check(short) == [] and is_accepted(short, Budget.of_steps(20_000))
    assert not is_accepted(claiming(delayed(short, short.period_ticks), 2 * short.period_ticks - 1))
    found = [
        lie
        for path, value in leaves(short)
        for lie in believed_lies(short, path, changed(short, path, value))
    ]
    found += [
        lie
        for path, change in changed_together(short)
        for lie in believed_lies(short, path, iter([change]))
    ]
    assert found == []


def test_each_cost_of_layers_has_a_rule():
    assert {*LAYER_COST_RULES, "per_tick", "per_unit"} == set(LayerCosts.__struct_fields__)


def test_the_kinds_are_what_they_are_called(files):
    scopes = {kind: files(kind).scope for kind in KINDS}
    assert set(scopes.values()) == set(Scope)
    assert files("roles moved").moves and any(seat.holds for seat in files("any layers").seats)
    assert files("overlapped").has_overlap and files("overlapped").times.of_layers
    assert files("bidirectional").grid.chains == 2 and files("any placement").times.of_layers
    assert any(op.kind is OpKind.B for op in files("fused").all_ops())


# --- The command, on lies of single kinds ---------------------------------------------------------


def answer(schedule: Schedule, tmp_path) -> tuple[int, str]:
    file = tmp_path / "file.json"
    file.write_bytes(codec.encode(schedule))
    result = CliRunner().invoke(app, ["check", "--bound", str(file)])
    return result.exit_code, result.output


def test_layers_that_cost_more_than_their_slice(files, tmp_path):
    """A plan of 13 s was called optimal, though 8.8 s were possible."""
    short = files("any layers")
    costs = short.times.of_layers
    higher = {}
    for name in ("forward", "backward_input", "backward_weight"):
        higher[name] = tuple(3 * ticks // 2 for ticks in getattr(costs, name))
    raised = replace(costs, **higher)
    long = delayed(short, short.period_ticks // 4)
    lie = replace(long, times=replace(long.times, of_layers=raised))
    code, text = answer(claiming(lie, lie.period_ticks), tmp_path)
    assert code == 1 and "times.of_layers says" in text and len(text.strip().splitlines()) <= 2
    result = CliRunner().invoke(app, ["check", "--bound", "--json", str(tmp_path / "file.json")])
    assert result.exit_code == 1 and json.loads(result.output)["violations"][0]["rule"] == "bound"


def test_a_scope_that_does_not_include_the_plan(files, tmp_path):
    code, text = answer(replace(files("any layers"), bound_scope=Scope.OWN), tmp_path)
    assert (
        code == 1
        and "bound_scope is 'own micro-batches', but the schedule is one of 'any layers'" in text
    )


def test_roles_in_other_columns_are_counted_where_they_are(tmp_path):
    """Workers are counted in the columns of their roles.

    They were counted in those that they left: 87 was proven of a plan of 83.
    """
    from slipstream.schedules.tables.relabel import relabel_schedule

    job = grid(
        2,
        2,
        [3, 2],
        times="forward = 1\nbackward_input = [0.1, 0]\nbackward_weight = 0.1\ntransfer = 1\n",
        more=LAYERS.format([3, 2]),
    )
    schedule = planned(job, ["1.0"], backward="fused", optimizer="synchronous")
    moved = relabel_schedule(schedule, [Worker(0, 1)])
    assert moved is not None and any(seat.role.column != seat.worker.column for seat in moved.seats)
    assert moved.lower_bound_ticks <= proven_bound(moved).ticks <= moved.period_ticks
    assert answer(moved, tmp_path)[0] == 0
