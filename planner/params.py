"""Parameters of the searches, with the values that did best on benchmarks.

The benchmarks are benchmarks.quality and benchmarks.layers. A file of parameters (`slipstream plan
--params FILE`) is TOML with a table for each group; a key that is left out keeps the value below:

    [annealing]
    aim = 0.4
    [cp_sat]
    largest_proof = 0

Shares are of the time, or the steps, left at that point. Ops are compute ops: F, I and W, or F and
B.
"""

import itertools
import tomllib
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Number = Annotated[float, Meta(ge=0.0)]
Factor = Annotated[float, Meta(ge=1e-9)]
Count = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]
Rounds = tuple[tuple[Count, Share], ...]
Field = Literal[
    "in_flight",
    "fill_wait",
    "lookahead",
    "forward_lookahead",
    "places",
    "gradient_places",
    "advance",
    "gradient_advance",
    "ignore_transfers",
    "load_share",
    "make_room",
    "rerouted",
]
"""Name of a field of a dispatch rule (`planner.search.list_scheduler.DispatchRule`)."""
Changes = Annotated[tuple[tuple[Field, AtLeastOne], ...], Meta(min_length=1)]


class ParamsError(ValueError):
    """Error for a file of parameters that cannot be read.

    The message names the file and, for a wrong value, its key and what is expected.
    """


class Choice(NamedTuple):
    """Pair of an assignment rule and a dispatch rule, tried before all combinations."""

    assignment: Annotated[int, Meta(ge=0, le=3)]
    """Index of the assignment rule in `ASSIGNMENT_RULES`."""
    limits: tuple[float, int] | None
    """Limits on micro-batches in flight: slope and extra for `scale_in_flight_limits`.

    None: there are no limits, the order is chosen as if transfers took no time, and the fields
    below do not count.
    """
    lookahead: float
    make_room: bool


class LayoutChoice(NamedTuple):
    """Dispatch rule that is tried early if a layout gives the worker of each unit.

    The fields are those of `DispatchRule`, except that `fill_wait` is in durations of an F: before
    a worker's first I or B, it starts no F if an I or B becomes ready within that time.
    """

    forward_order: Literal["deepest", "oldest"]
    lookahead: float
    fill_wait: float
    forward_lookahead: float
    advance: float
    gradient_advance: float


class ListParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of the search over list schedules: rules to combine, then random changes."""

    share: Share = 0.3
    """Share of the time for list schedules of the problem in place, if annealing follows.

    It is that of a search with this problem as its only candidate.
    """
    most_steps: Count = 1000
    """Largest number of random changes for one subproblem, except in `LayoutParams.restarts`."""
    fewest_steps: Count = 8
    """Number of random changes allowed however large the problem, while there is time."""
    most_ops: Count = 20_000_000
    """Largest number of ops in all schedules by random changes together, for one problem."""
    starts: AtLeastOne = 4
    """Number of the best rules tried first, from which random changes start."""
    stale_steps: AtLeastOne = 150
    """Number of random changes in a row without gain, after which they start again.

    The next change starts from one of the `starts` rules.
    """
    stale_starts: AtLeastOne = 10
    """Number of such restarts in a row without gain after which the search ends."""
    grid_share: Share = 0.3
    """Share of the time after which random changes begin, if they may exchange workers, too.

    Until then, all combinations of rules are tried in turn.
    """
    assignment_steps: Share = 0.5
    """Share of the random changes that exchange workers of re-routed units, where they may."""
    changes: Changes = (
        ("in_flight", 28),
        ("fill_wait", 15),
        ("lookahead", 14),
        ("forward_lookahead", 7),
        ("places", 6),
        ("gradient_places", 6),
        ("ignore_transfers", 6),
        ("load_share", 4),
        ("make_room", 3),
        ("rerouted", 2),
    )
    """Fields of a dispatch rule among which a random change chooses, with weights.

    A weight is the mean of two: how often a change of the field made a plan shorter, and one that
    is mostly on limits in flight. This mean did best on benchmarks.quality.
    """
    changes_of_layouts: Changes = (
        ("fill_wait", 25),
        ("places", 12),
        ("gradient_places", 12),
        ("gradient_advance", 12),
        ("lookahead", 12),
        ("forward_lookahead", 9),
        ("advance", 6),
        ("in_flight", 6),
        ("ignore_transfers", 2),
        ("make_room", 1),
    )
    """Fields and weights as in `changes`, for layouts: by gains in benchmarks.layers."""
    changes_twice: Share = 0.3
    """Share of the random changes that change two fields of a dispatch rule."""
    load_shares: Annotated[tuple[float, ...], Meta(min_length=1)] = (0.0, 0.5, 1.0, 1.5, 2.0)
    """Values from which `DispatchRule.load_share` is drawn."""
    places: Annotated[tuple[float, ...], Meta(min_length=1)] = (
        -4.0,
        -2.0,
        -1.0,
        -0.5,
        0.5,
        1.0,
        2.0,
        4.0,
    )
    """Numbers of places by which a change moves a micro-batch before its turn; negative: after."""
    least_advance: int = -32
    """Smallest value that is drawn for `advance` and `gradient_advance`, times `fractions`."""
    most_advance: int = 48
    """Largest value that is drawn for `advance` and `gradient_advance`, times `fractions`."""
    fractions: AtLeastOne = 8
    """Denominator of the fractions that are drawn as values of a dispatch rule's fields."""
    shortlist: Annotated[tuple[Choice, ...], Meta(min_length=1)] = tuple(
        itertools.starmap(
            Choice,
            (
                (0, (2.0, 0), 0.0, False),
                (1, (1.5, 0), 0.5, True),
                (1, None, 0.0, False),
                (0, (1.0, 0), 1.0, True),
                (0, (1.25, 0), 0.0, False),
                (1, (1.0, 0), 0.5, True),
                (0, (2.0, 1), 0.0, False),
                (1, (1.25, 1), 0.5, True),
                (0, (1.5, 0), 0.5, False),
                (0, (1.25, 0), 0.5, False),
                (1, (1.0, 2), 0.5, True),
                (0, (1.0, 2), 1.0, True),
                (1, (2.0, 0), 0.0, False),
                (1, (1.0, 1), 1.0, False),
            ),
        )
    )
    """Choices that are tried before all combinations of rules.

    On 31 jobs with failures and little, more and much memory, the best of all choices was one of
    these, and no fewer would do. The first is for much memory.
    """
    shortlist_of_layouts: tuple[LayoutChoice, ...] = tuple(
        itertools.starmap(
            LayoutChoice,
            (
                ("oldest", 0.5, 0.5, 0.5, 0.0, 0.0),
                ("oldest", 0.5, 0.5, 0.5, 0.5, 4.0),
                ("deepest", 0.0, 1.0, 0.0, 0.0, 0.0),
                ("oldest", 0.25, 0.5, 0.5, 2.0, 2.0),
                ("deepest", 0.0, 0.25, 0.0, 0.0, 0.0),
                ("oldest", 0.5, 0.5, 0.0, 2.0, 2.0),
                ("deepest", 0.25, 0.5, 0.5, 0.0, 0.0),
                ("oldest", 0.25, 0.5, 0.5, 0.0, 0.0),
                ("deepest", 0.0, 0.5, 0.5, 0.0, 0.0),
                ("oldest", 0.5, 0.5, 0.5, 2.0, 2.0),
                ("deepest", 0.5, 0.5, 0.5, 2.0, 0.0),
                ("oldest", 0.25, 0.5, 0.5, -1.0, 4.0),
                ("oldest", 0.0, 0.5, 0.0, 2.0, 2.0),
                ("oldest", 0.5, 0.5, 0.0, 0.0, 0.0),
                ("deepest", 0.5, 0.5, 0.0, 0.0, 0.0),
            ),
        )
    )
    """Rules that are tried for layouts before `shortlist`.

    Of many combinations, these were the best for some instance of benchmarks.layers, the most
    frequent winners first.
    """
    largest_untimed: Count = 20_000
    """Number of ops up to which 1F1B and ReCycle are tried with no time left."""


class PieceParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of the division into subproblems of broken and helping pipelines."""

    largest: Count = 60_000
    """Number of ops up to which a subproblem gets more healthy pipelines than it needs."""
    shedding: Count = 3
    """Factor on the number of a subproblem's healthy pipelines if live workers may shed work."""
    largest_shedding: Count = 6_000
    """Number of ops up to which a subproblem gets `shedding` times as many healthy pipelines."""
    few: Count = 2
    """Micro-batches of a pipeline, per stage, below which live workers may shed their own.

    With so few, one more micro-batch on a worker delays all others of its pipeline.
    """


class Cooling(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of one cooling cycle of annealing, from a high temperature to a low one.

    A step that adds d to the cost is accepted with probability exp(-d / temperature).
    """

    hot: Factor
    """Temperature at the beginning of the cycle, in mean durations of an op."""
    cold: Factor
    """Temperature at the end of the cycle, in mean durations of an op."""
    pull: Number
    """Weight, in the cost, of a pipeline's mean excess of busy windows over the goal.

    The excess of its longest window has weight 1. Where many plans have an equally long window, a
    large weight still tells them apart.
    """
    begin: Share = 0.0
    """Start of the part that this cycle may change, as a share of the period."""
    end: Share = 1.0
    """End of the part that this cycle may change, as a share of the period."""


class AnnealingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of simulated annealing of the order and the workers of ops."""

    cycles: Annotated[tuple[Cooling, ...], Meta(min_length=1)] = (
        Cooling(hot=0.15, cold=0.02, pull=3.0),
        Cooling(hot=1.0, cold=0.1, pull=3.0, end=0.3),
        Cooling(hot=1.0, cold=0.1, pull=3.0, begin=0.7),
        Cooling(hot=0.3, cold=0.1, pull=10.0),
        Cooling(hot=0.3, cold=0.1, pull=30.0),
    )
    """Cooling cycles, run in turn; none is the best on all jobs.

    The first must be of the whole plan. Those of one end of the plan are hotter, since filling and
    draining bear more heat. After all of them, the number of steps doubles.
    """
    steps_per_op: AtLeastOne = 60
    """Number of steps of a cooling cycle for each op, before the number doubles."""
    ops_per_cycle: AtLeastOne = 800_000_000
    """Largest product of a cycle's steps, before they double, and the ops of one pipeline."""
    fewest_steps: AtLeastOne = 2_000
    """Least number of steps of a cooling cycle."""
    aim: Share = 0.5
    """Place of a cycle's goal between the best period (0) and the bound (1).

    Only windows that are longer than the goal cost.
    """
    steps_per_round: AtLeastOne = 10_000
    """Maximum number of steps, some 50 ms, between two reads of the clock."""
    ops_per_round: AtLeastOne = 30_000_000
    """Maximum product of steps between two reads of the clock and ops of a pipeline."""
    trade: Share = 2 / 24
    """Share of the steps in which two units trade workers and places, where allowed."""
    move: Share = 1 / 24
    """Share of the steps in which a unit moves to another worker, where allowed.

    All other steps exchange runs of ops.
    """
    steps_per_shift: AtLeastOne = 60
    """Mean number of steps between two shifts of a group's deadline, for each pipeline.

    The deadline is the tick by which the group's compute ops must end.
    """
    ops_per_shift: AtLeastOne = 8
    """Divisor of the ops that gives the least mean number of steps between two shifts.

    A shift takes longer the more ops there are, since it times all of them anew.
    """
    largest_run: AtLeastOne = 6
    """Largest number of neighbouring ops that exchange places with those next to them."""
    longest_jump: AtLeastOne = 16
    """Largest number of ops of its worker over which a single op jumps."""
    margin: Number = 0.3
    """Mean durations of an op by which one window may grow beyond the accepted cost.

    The same step may shorten other windows.
    """
    steps_per_path: AtLeastOne = 16
    """Maximum number of steps before another critical path is drawn, so that all are tried."""
    ops_per_step: AtLeastOne = 8
    """Divisor of the ops that gives the steps between two passes over all ops.

    Such a pass, which renews what steps estimate from, takes about as long as the steps.
    """
    chains: AtLeastOne = 2
    """Number of parallel annealing runs of a subproblem, the same on any machine."""
    spare_units: Count = 8
    """Number of units that a worker may run beyond what the busiest runs at first."""
    begin_seconds: Number = 12e-6
    """Seconds per op that must be left for annealing to begin.

    They are for one round and its timing.
    """

    def __post_init__(self) -> None:
        if self.trade + self.move > 1:
            raise ValueError(
                f"annealing: trade + move is {self.trade + self.move:g}; expected at most 1"
            )


class CpSatParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of CP-SAT, which proves bounds and improves plans of small subproblems."""

    largest_proof: Count = 1500
    """Number of ops, once for each possible worker, up to which CP-SAT tries a proof."""
    largest_layered: Count = 400
    """Number of single layers' ops up to which CP-SAT also plans a whole job.

    Each op counts once for each live worker. Such a plan is made only if layouts are searched.
    """
    proof_share: Share = 0.6
    """Share of the time left that CP-SAT may spend on each subproblem."""
    largest_relaxed: Count = 1000
    """Number of ops up to which CP-SAT uses linear relaxations: proofs end a third sooner.

    In larger models they exceed the time limit by seconds and prove nothing (the worked example; 8
    pipelines x 8 stages x 16 micro-batches).
    """
    hint_cycles: AtLeastOne = 3
    """Number of cooling cycles of annealing that a plan gets before it is CP-SAT's hint."""


class LayoutParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of the search over candidates: the problem with layers in place, and layouts."""

    quick_share: Share = 0.2
    """Share of the seconds for a first plan by list schedules, if layers may move."""
    most: AtLeastOne = 17
    """Maximum number of layouts that are considered."""
    fewest: Count = 4
    """Minimum number of layouts in a search by list schedules alone, however short."""
    seconds: Factor = 6e-5
    """Seconds, per micro-batch at each stage, for one layout in a search by list schedules."""
    share: Share = 0.4
    """Share of the search's time for the first, few list schedules of all candidates."""
    first_share_fixed: Share = 0.25
    """Share of list schedules' time for the problem in place, if layers may not move."""
    first_share_move: Share = 0.1
    """Share of list schedules' time for the problem in place, if layers may move."""
    first: Number = 2.0
    """Factor on a layout's equal share of list schedules' time left; later ones promise less."""
    undivided: AtLeastOne = 8
    """Number of pipelines up to which all share work together in a layout."""
    most_helpers: Count = 16
    """Maximum number of healthy pipelines that share the work of one with lost workers."""
    fewer_helpers: Share = 0.005
    """Fraction by which the longest load may grow if fewer healthy pipelines help."""
    largest_shared: Count = 100_000
    """Product of micro-batches and stages up to which all pipelines may share their work.

    It limits only layouts made where layers may move.
    """
    largest_narrow: Count = 100
    """Product of micro-batches and stages up to which a layout has narrow pipelines.

    Narrow pipelines have as few workers as memory allows, down to whole models on single workers,
    which need not be filled and drained.
    """
    parts: AtLeastOne = 4
    """Number of equal parts into which stages are cut in layouts with short slices."""
    few_parts: AtLeastOne = 2
    """Smaller number of parts of a stage, tried before `parts`."""
    largest_fine: Count = 40_000
    """Number of slices of all micro-batches up to which layouts with short slices are made."""
    separate_parts: AtLeastOne = 3
    """Number of parts of a stage in a layout where few pipelines share micro-batches.

    Thirds are mostly best.
    """
    finest_parts: AtLeastOne = 6
    """Larger number of parts of a stage, tried too if the job is small."""
    largest_finest: Count = 10_000
    """Number of slices of all micro-batches up to which `finest_parts` is tried."""
    least_share: Share = 0.25
    """Least share of a stage that a slice of shared micro-batches is assumed to have.

    Shorter slices wait longer than they take.
    """
    fewer_sets: Share = 0.01
    """Share of the period by which loads may grow so that fewer pipelines share micro-batches."""
    fine_rate: Number = 10_000.0
    """Number of short slices of all micro-batches allowed per second of list schedules."""
    small_share: Share = 0.25
    """Share of the time left, after list schedules, for what CP-SAT plans or improves."""
    restarts: Rounds = ((7, 0.25), (3, 0.35))
    """Rounds of random changes of dispatch rules for the most promising layouts.

    Each round is a pair: number of layouts, and share of the time left that they have together.
    """
    large_restarts: Rounds = ((7, 0.4), (3, 0.5))
    """Rounds as in `restarts`, used if a layout has more than `largest_annealed` ops."""
    largest_annealed: Count = 15_000
    """Number of a layout's ops above which annealing has time to change only few."""
    restart_steps: Count = 10_000
    """Largest number of random changes of rules for a layout in a round of `restarts`."""
    largest_alone: Count = 5_000
    """Number of ops above which random changes run in two threads, mostly in compiled code."""
    halvings: Rounds = ((7, 0.25), (2, 0.3))
    """Rounds of annealing: number of candidates, and share of the time left.

    This is successive halving (Karnin et al. 2013).
    """
    again: Number = 3.0
    """Expected gain of a candidate's next annealing, as a multiple of the last one's gain."""


class BlockParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of plans in blocks of micro-batches, and of the time kept for other work."""

    certain: Count = 50_000
    """Number of ops up to which jobs are planned whole: in under a second anywhere."""
    quick: Count = 20_000
    """Number of ops up to which jobs are planned whole if given no grace."""
    sample: AtLeastOne = 21_000
    """Number of compute ops of the part of a job that measures the planner's pace."""
    grace_seconds: Number = 1.0
    """Seconds by which a plan may exceed its limit, or `grace_share` if that is more."""
    grace_share: Number = 0.2
    """Share of the time limit by which a plan may exceed it."""
    margin: Factor = 1.25
    """Factor on the measured time of joining blocks: per op, large jobs take longer."""
    whole_margin: Factor = 1.75
    """Factor on the measured time of a whole plan, to choose between whole and blocks."""
    share: Share = 0.3
    """Share of the time for the first plans of all blocks; the rest improves them."""
    largest_moved: Count = 500_000
    """Ops up to which jobs with movable layers, or a single step, are planned whole."""
    largest_baseline: Count = 200_000
    """Number of ops up to which 1F1B and ReCycle re-route among all pipelines."""
    piecewise: Count = 30_000
    """Number of ops up to which jobs are planned whole if only their period counts."""
    recomputed_share: Share = 0.2
    """Share of the search's time to choose the stages that recompute, by list schedules.

    The whole search with the best choice, and without any, then has as much time again.
    """
    largest_compared: Count = 50_000
    """Number of compute ops up to which alternatives to a plan are planned, too."""
    reference_share: Share = 0.15
    """Share of the time for the plan without failures, needed for comparison."""
    finish_seconds: Number = 15e-6
    """Seconds for each op that are reserved to put a plan together and check it."""
    finish_share: Share = 0.4
    """Maximum share of the time reserved to put a plan together and check it."""


class RoleParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of the choice of vacant roles, if live workers may take over others."""

    exhaustive: Count = 60
    """Number of failure patterns up to which all are candidates."""
    distributions: AtLeastOne = 4
    """Number of distributions of failures over columns that the dynamic programme stores."""
    compared: Share = 0.3
    """Share of the time to plan all sets of vacant roles, or all role assignments.

    The best few are then planned again: sets in as much time, assignments in the rest of it.
    """
    finalists: AtLeastOne = 3
    """Number of sets of vacant roles, or of assignments, that are planned a second time."""
    share: Share = 0.5
    """Share of the time for plans with moved roles, if layers stay in place."""
    share_of_layers: Share = 0.25
    """Share of the time for plans with moved roles, if layers may move."""


class OverlapParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of plans whose reductions overlap compute (`[network] overlap`)."""

    cut: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    """Numbers to try of each worker's last micro-batches that run layer by layer, ascending."""
    few: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (2, 6, 16)
    """Numbers from `cut` that are tried first.

    Then the neighbours, in `cut`, of the last number that helped are tried, while the plan gets
    shorter.
    """
    pieces: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (32, 8, 4, 2)
    """Maximum numbers to try of ranges into which layers reduced together are divided.

    Only the first is tried if a reduction has no latency.
    """
    share: Share = 0.5
    """Share of reductions' time that occupies workers in the second of two searches."""
    first_share_fixed: Share = 0.5
    """Share of the time for the first search, which often suffices if layers are fixed."""
    first_share_move: Share = 0.2
    """Share of the time for the first search, without reductions, if layers may move."""
    largest: Count = 200_000
    """Number of ops above which only the middle number of `cut` is tried."""


class FailureParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of plans that are made for failures during a run."""

    at_once_seconds: Factor = 0.3
    """Seconds to plan while all workers wait.

    If no plan is found in this time, the first one found later is used.
    """
    meanwhile_seconds: Factor = 2.0
    """Seconds to plan for other speeds of workers, while these continue."""
    large_seconds: Factor = 10.0
    """Time limit of a plan too large to be assembled within the other limits."""
    roles_seconds: Factor = 10.0
    """Time limit of a plan in which workers take over other roles: several are planned."""
    settled_seconds: Factor = 10.0
    """Seconds to plan a rebalanced schedule, while all workers train."""
    pause_pays_seconds: Factor = 3600.0
    """Seconds of training in which moved roles must make up for loading layers."""
    joining_seconds: Factor = 1.0
    """Seconds that a pause for moved roles takes in addition to loading layers."""
    large: Count = 30_000
    """Number of ops above which no micro-batch is cut: the search costs too much time."""
    largest: Count = 500_000
    """Number of ops up to which jobs above `large` get a first plan only."""


class SearchParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Parameters of all searches, in groups that are the tables of a parameter file."""

    pieces: PieceParams = msgspec.field(default_factory=PieceParams)
    lists: ListParams = msgspec.field(default_factory=ListParams)
    annealing: AnnealingParams = msgspec.field(default_factory=AnnealingParams)
    cp_sat: CpSatParams = msgspec.field(default_factory=CpSatParams)
    layouts: LayoutParams = msgspec.field(default_factory=LayoutParams)
    roles: RoleParams = msgspec.field(default_factory=RoleParams)
    blocks: BlockParams = msgspec.field(default_factory=BlockParams)
    overlap: OverlapParams = msgspec.field(default_factory=OverlapParams)
    failures: FailureParams = msgspec.field(default_factory=FailureParams)

    def __repr__(self) -> str:
        """Return text with only those groups that differ from their defaults."""
        usual = DEFAULTS
        changed = [
            f"{name}={getattr(self, name)!r}"
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(usual, name)
        ]
        return f"SearchParams({', '.join(changed)})"


DEFAULTS = SearchParams()


def read_params(path: Path) -> SearchParams:
    """Read parameters of searches from a TOML file, with defaults for the others.

    Raises ParamsError if the file cannot be read, is no TOML, or has an unknown key or a wrong
    value.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), SearchParams)
    except OSError as error:
        raise ParamsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # what is no UTF-8, no TOML, or does not fit
        raise ParamsError(f"{path}: {error}") from None
