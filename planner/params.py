"""What steers a search, with the values that did best on benchmarks.quality and benchmarks.layers.

A file of these (`slipstream plan --params FILE`) is TOML with a table for each group; what it leaves out stays as here:

    [annealing]
    aim = 0.4
    [cp_sat]
    largest_proof = 0

Shares are of the time, or the steps, that is left at that point. Ops are compute ops: F, I and W, or F and B.
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
Field = Literal["in_flight", "fill_wait", "lookahead", "forward_lookahead", "places", "gradient_places", "advance",
                "gradient_advance", "ignore_transfers", "load_share", "make_room", "rerouted"]
"""Of a dispatch rule (`planner.search.list_scheduler.DispatchRule`)."""
Changes = Annotated[tuple[tuple[Field, AtLeastOne], ...], Meta(min_length=1)]


class ParamsError(ValueError):
    """A file of parameters that cannot be read. The message names the file, the key and what was expected."""


class Choice(NamedTuple):
    """An assignment rule and a dispatch rule of the shortlist."""

    assignment: Annotated[int, Meta(ge=0, le=3)]
    """Which of `ASSIGNMENT_RULES`."""
    limits: tuple[float, int] | None
    """Slope and extra of the limits in flight; None: no limits, and transfers are ignored."""
    lookahead: float
    make_room: bool


class LayoutChoice(NamedTuple):
    """Fields of a dispatch rule; `fill_wait` is a share of an F."""

    forward_order: Literal["deepest", "oldest"]
    lookahead: float
    fill_wait: float
    forward_lookahead: float
    advance: float
    gradient_advance: float


class ListParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """List schedules: a grid of dispatch rules under several assignments, then random steps from the best of them."""

    share: Share = 0.3
    """Of the time, where more follows and there is one candidate."""
    most_steps: Count = 1000
    """Random steps for one problem, at most;"""
    fewest_steps: Count = 8
    """and at least, where there is time."""
    most_ops: Count = 20_000_000
    """Ops that all random steps of a problem together may schedule."""
    starts: AtLeastOne = 4
    """The best rules of the grid, from which random steps start."""
    stale_steps: AtLeastOne = 150
    """Random steps in a row that find nothing better, after which they start again from one of the best rules."""
    stale_starts: AtLeastOne = 10
    """Such starts in a row, after which the search ends."""
    grid_share: Share = 0.3
    """Of the time, for the grid, where the random steps may also change the assignment."""
    assignment_steps: Share = 0.5
    """Share of the random steps that change the assignment."""
    changes: Changes = (
        ("in_flight", 28), ("fill_wait", 15), ("lookahead", 14), ("forward_lookahead", 7), ("places", 6),
        ("gradient_places", 6), ("ignore_transfers", 6), ("load_share", 4), ("make_room", 3), ("rerouted", 2))
    """Which field of a rule a random step changes, and how often: half by how often each made a plan shorter, half
    mostly limits in flight: the mean of both did best on the grids of benchmarks.quality."""
    changes_of_layouts: Changes = (
        ("fill_wait", 25), ("places", 12), ("gradient_places", 12), ("gradient_advance", 12), ("lookahead", 12),
        ("forward_lookahead", 9), ("advance", 6), ("in_flight", 6), ("ignore_transfers", 2), ("make_room", 1))
    """The same where a layout is ordered, by how often each made a plan shorter on benchmarks.layers."""
    changes_twice: Share = 0.3
    """Of the random steps, those that change two fields."""
    load_shares: Annotated[tuple[float, ...], Meta(min_length=1)] = (0.0, 0.5, 1.0, 1.5, 2.0)
    """Of which `load_share` is drawn;"""
    places: Annotated[tuple[float, ...], Meta(min_length=1)] = (-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0)
    """by which of these a micro-batch goes before its turn;"""
    least_advance: int = -32
    """advances are drawn from this"""
    most_advance: int = 48
    """to this"""
    fractions: AtLeastOne = 8
    """in these parts of one, and so are shares."""
    shortlist: Annotated[tuple[Choice, ...], Meta(min_length=1)] = tuple(itertools.starmap(Choice, (
        (0, (2.0, 0), 0.0, False), (1, (1.5, 0), 0.5, True), (1, None, 0.0, False), (0, (1.0, 0), 1.0, True),
        (0, (1.25, 0), 0.0, False), (1, (1.0, 0), 0.5, True), (0, (2.0, 1), 0.0, False), (1, (1.25, 1), 0.5, True),
        (0, (1.5, 0), 0.5, False), (0, (1.25, 0), 0.5, False), (1, (1.0, 2), 0.5, True), (0, (1.0, 2), 1.0, True),
        (1, (2.0, 0), 0.0, False), (1, (1.0, 1), 1.0, False))))
    """What is tried before the grid: of all choices, the fewest whose best was the best of all on 31 jobs with failures
    and little, more and much memory. The first is for much memory."""
    shortlist_of_layouts: tuple[LayoutChoice, ...] = tuple(itertools.starmap(LayoutChoice, (
        ("oldest", 0.5, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 0.5, 4.0), ("deepest", 0.0, 1.0, 0.0, 0.0, 0.0),
        ("oldest", 0.25, 0.5, 0.5, 2.0, 2.0), ("deepest", 0.0, 0.25, 0.0, 0.0, 0.0),
        ("oldest", 0.5, 0.5, 0.0, 2.0, 2.0), ("deepest", 0.25, 0.5, 0.5, 0.0, 0.0),
        ("oldest", 0.25, 0.5, 0.5, 0.0, 0.0), ("deepest", 0.0, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 2.0, 2.0),
        ("deepest", 0.5, 0.5, 0.5, 2.0, 0.0), ("oldest", 0.25, 0.5, 0.5, -1.0, 4.0),
        ("oldest", 0.0, 0.5, 0.0, 2.0, 2.0), ("oldest", 0.5, 0.5, 0.0, 0.0, 0.0),
        ("deepest", 0.5, 0.5, 0.0, 0.0, 0.0))))
    """The same for layouts, before those: the best rules of a grid on instances of benchmarks.layers, those that were
    best most often first."""
    largest_untimed: Count = 20_000
    """Ops up to which the schedules that others run are tried when the time is over, too."""


class PieceParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Pieces that are planned apart: pipelines that have lost workers, with whole ones that help them."""

    largest: Count = 60_000
    """Ops of a piece up to which it is given more whole pipelines than it needs;"""
    shedding: Count = 3
    """so many times as many, where their own micro-batches may be handed on, too,"""
    largest_shedding: Count = 6_000
    """up to so many ops."""
    few: Count = 2
    """Micro-batches for each stage below which they may: then one more on a worker delays all of its pipeline's others.
    """


class Cooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """One cooling cycle of annealing."""

    hot: Factor
    """Temperature at its beginning, in mean op lengths;"""
    cold: Factor
    """and at its end."""
    pull: Number
    """Weight of what all windows together exceed what the cycle aims at: a large one leads out of plateaus where many
    windows are the longest."""
    begin: Share = 0.0
    """Only the part of the plan from here"""
    end: Share = 1.0
    """to here changes, in shares of it: how pipelines fill and drain takes higher temperatures than the rest can."""


class AnnealingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Simulated annealing of orders and hosts."""

    cycles: Annotated[tuple[Cooling, ...], Meta(min_length=1)] = (
        Cooling(hot=0.15, cold=0.02, pull=3.0), Cooling(hot=1.0, cold=0.1, pull=3.0, end=0.3),
        Cooling(hot=1.0, cold=0.1, pull=3.0, begin=0.7), Cooling(hot=0.3, cold=0.1, pull=10.0),
        Cooling(hot=0.3, cold=0.1, pull=30.0))
    """In turn; none is the best on all jobs. The first must be of the whole plan. When all are done, they take twice as
    many steps."""
    steps_per_op: AtLeastOne = 60
    """Of the first cycles."""
    ops_per_cycle: AtLeastOne = 800_000_000
    """Ops that all pipelines together have in the steps of a first cycle, at most."""
    fewest_steps: AtLeastOne = 2_000
    """Of a cycle."""
    aim: Share = 0.5
    """Share of the way from the best plan's period to the bound: only windows longer than that count in a cycle."""
    steps_per_round: AtLeastOne = 10_000
    """Between two looks at the clock: some 50 ms;"""
    ops_per_round: AtLeastOne = 30_000_000
    """and ops in these steps, at most."""
    trade: Share = 2 / 24
    """Share of the steps in which two units of a slice trade workers and places, where units may change workers."""
    move: Share = 1 / 24
    """Share of the steps in which a unit moves to another worker; all others exchange neighbouring runs of ops."""
    steps_per_shift: AtLeastOne = 60
    """One in so many steps for each pipeline of a piece shifts a deadline;"""
    ops_per_shift: AtLeastOne = 8
    """or one in the ops of the piece divided by this, where that is rarer: a shift times all of them anew."""
    largest_run: AtLeastOne = 6
    """Most ops in a run of neighbours that changes places with another one."""
    longest_jump: AtLeastOne = 16
    """Most ops that a single one jumps over."""
    margin: Number = 0.3
    """By how much a window may become longer where others may become shorter: in mean op lengths."""
    steps_per_path: AtLeastOne = 16
    """Steps that try ops of one critical path, at most, so that all critical paths are tried."""
    ops_per_step: AtLeastOne = 8
    """All heads are found anew once in as many steps as the piece has ops, divided by this: no longer than the steps
    themselves take."""
    chains: AtLeastOne = 2
    """Side by side, in threads: always as many, so that no plan depends on the machine."""
    spare_units: Count = 8
    """Units that a worker may run beyond those of the busiest one at the start."""
    begin_seconds: Number = 12e-6
    """What it takes for each op to begin, to do one round, and to time what comes of it; less is not begun with."""

    def __post_init__(self) -> None:
        if self.trade + self.move > 1:
            raise ValueError(f"annealing: trade + move is {self.trade + self.move:g}; expected at most 1")


class CpSatParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """CP-SAT: proofs, and better plans of small pieces."""

    largest_proof: Count = 1500
    """Ops, counted once for each possible host, up to which CP-SAT improves a piece and proves it optimal."""
    proof_share: Share = 0.6
    """Of the time that is left, for each piece."""
    largest_relaxed: Count = 1000
    """Ops up to which linear relaxations pay: a third sooner proven; in larger models they overrun the time by seconds
    and prove nothing (the worked example; 8 pipelines x 8 stages x 16 micro-batches)."""
    hint_cycles: AtLeastOne = 3
    """Cooling cycles of annealing that make a good hint for it."""


class LayoutParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Candidates: the problem with layers in place, and layouts that cut micro-batches or move layers."""

    quick_share: Share = 0.2
    """Of the time by the clock, for a plan by list schedules alone, where layers may move; the search is not worse."""
    most: AtLeastOne = 17
    """Layouts that are looked at;"""
    fewest: Count = 4
    """by list schedules alone, at least so many,"""
    seconds: Factor = 6e-5
    """and others as far as there is so much time for each micro-batch at a stage."""
    share: Share = 0.4
    """Of the time, for a few list schedules of all candidates;"""
    first_share_fixed: Share = 0.25
    """of that, for the problem as it is, where layers stay in place;"""
    first_share_move: Share = 0.1
    """and where they may move."""
    first: Number = 2.0
    """Each layout has so many times its equal share: many a later one cannot be the best."""
    undivided: AtLeastOne = 8
    """Pipelines up to which layouts are made of all together; of more, group by group:"""
    most_helpers: Count = 16
    """a replica that is cut anew with so many whole pipelines at most,"""
    fewer_helpers: Share = 0.005
    """with fewer where its longest load is longer by no more than such a share."""
    largest_shared: Count = 100_000
    """Micro-batches times stages up to which layouts are made that are not divided into groups."""
    parts: AtLeastOne = 4
    """Into how many parts a stage is cut for short slices,"""
    few_parts: AtLeastOne = 2
    """at first fewer,"""
    largest_fine: Count = 40_000
    """and micro-batches times parts of stages up to which it is;"""
    separate_parts: AtLeastOne = 3
    """the same for micro-batches that are spread separately: thirds are the best most often,"""
    finest_parts: AtLeastOne = 6
    """what is small in sixths, too,"""
    largest_finest: Count = 10_000
    """up to so many."""
    least_share: Share = 0.25
    """Of a stage, which a worker takes of a micro-batch that is spread separately: shorter slices wait longer than they
    take."""
    fewer_sets: Share = 0.01
    """By how much of the period loads may be longer than with fewer and larger sets of replicas, each separate."""
    fine_rate: Number = 10_000.0
    """For each second of list schedules, micro-batches times parts of stages up to which short slices are tried."""
    small_share: Share = 0.25
    """Of the time left after these, for the problem as it is, where CP-SAT can improve it."""
    restarts: Rounds = ((7, 0.25), (3, 0.35))
    """How many of the most promising layouts have random steps from their best list schedules, and the share of the
    time left that they have together, in turns;"""
    large_restarts: Rounds = ((7, 0.4), (3, 0.5))
    """the same where one of them has more ops than"""
    largest_annealed: Count = 15_000
    """this, of which annealing could change but a few in the time."""
    restart_steps: Count = 10_000
    """Such random steps for a layout, at most."""
    largest_alone: Count = 5_000
    """Ops up to which half of the time of a list schedule or more is spent in the interpreter; beyond, layouts have
    their random steps in two threads."""
    halvings: Rounds = ((7, 0.25), (2, 0.3))
    """How many of the most promising are annealed, and the share of the time left that they have together; then one has
    the rest (successive halving, Karnin et al. 2013)."""
    again: Number = 3.0
    """How often a candidate is expected to gain again what annealing gained in its last turn."""


class BlockParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Jobs that are planned in blocks of micro-batches, and what a plan takes beside its search."""

    certain: Count = 50_000
    """Compute ops that are planned, put together and checked in less than a second on any machine: nothing is measured;
    """
    quick: Count = 20_000
    """the same where there is no grace."""
    sample: AtLeastOne = 21_000
    """Compute ops of the part of a job by which speed is measured."""
    grace_seconds: Number = 1.0
    """What a plan may take beyond its time limit:"""
    grace_share: Number = 0.2
    """the larger of the two."""
    margin: Factor = 1.25
    """How much longer large things may take, for each op, than the sample: to join blocks,"""
    whole_margin: Factor = 1.75
    """and to plan without any."""
    share: Share = 0.3
    """Of the time, that the first plan of all blocks may take; the rest improves it."""
    largest_moved: Count = 500_000
    """Compute ops up to which a job is never cut into blocks where layers may move: in blocks they could not."""
    largest_baseline: Count = 200_000
    """Compute ops up to which a baseline assigns the micro-batches of the dead among all pipelines, not in groups."""
    piecewise: Count = 30_000
    """Compute ops up to which a job whose period alone is asked for is put together, and not looked at by pieces."""
    recomputed_share: Share = 0.2
    """Of the time, to choose what is computed again."""
    largest_compared: Count = 50_000
    """Compute ops up to which there is time to plan what else could be done."""
    reference_share: Share = 0.15
    """Of the time, that the fault-free plan, needed for comparison, may take."""
    finish_seconds: Number = 15e-6
    """What it takes to put a plan together and check it, for each op,"""
    finish_share: Share = 0.4
    """at most this share of the time."""


class RoleParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Which roles stay vacant where live workers may take over others."""

    exhaustive: Count = 60
    """Up to so many patterns of a number of failures, all are planned."""
    distributions: AtLeastOne = 4
    """How many distributions of failures over columns the dynamic programme keeps."""
    compared: Share = 0.3
    """Of the time, to compare all candidates, and again for the best few; the best has the rest."""
    finalists: AtLeastOne = 3
    """The best few."""
    share: Share = 0.5
    """Of the time, for plans with roles moved beside one with layers in place;"""
    share_of_layers: Share = 0.25
    """the same beside one with layers moved."""


class OverlapParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Plans whose reductions go on beside compute (`[network] overlap`)."""

    cut: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    """Micro-batches of each worker that are cut, the last ones, ascending; the number with the shortest period counts.
    """
    few: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (2, 6, 16)
    """Tried first; then the numbers next to the best, while these are better."""
    pieces: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (32, 8, 4, 2)
    """Into which layers that are reduced together are divided at most; but the first, where each piece has a latency.
    """
    share: Share = 0.5
    """Of their time, that reductions are taken to occupy workers where more is searched."""
    first_share_fixed: Share = 0.5
    """Of the time, what the search without reductions has: with layers in place its plan is often proven to be the
    best;"""
    first_share_move: Share = 0.2
    """and where they may move."""
    largest: Count = 200_000
    """Ops up to which all numbers are tried; of more, only the middle one of `cut`."""


class FailureParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Plans for failures while a run goes on."""

    at_once_seconds: Factor = 0.3
    """Time limit of a plan for which all wait. Where no plan is found so soon, the first one is taken."""
    meanwhile_seconds: Factor = 2.0
    """Of one for other speeds, for which nobody waits."""
    large_seconds: Factor = 10.0
    """Of one that is too large to be put together within the others."""
    roles_seconds: Factor = 10.0
    """Of one in which workers take over other roles: several are planned."""
    settled_seconds: Factor = 10.0
    """Of one to come to, which is planned while all train."""
    pause_pays_seconds: Factor = 3600.0
    """Within this time a schedule with roles moved must make up for the pause in which their layers are loaded;"""
    joining_seconds: Factor = 1.0
    """which lasts so much longer than loading them alone."""
    large: Count = 30_000
    """Ops of a large plan, in which no micro-batch is cut: that takes longer to find than it brings;"""
    largest: Count = 500_000
    """and of one that is found in some seconds all the same: the first that is found is taken."""


class SearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """All of them."""

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
        """Only what differs from the usual values."""
        usual = DEFAULTS
        changed = [f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__
                   if getattr(self, name) != getattr(usual, name)]
        return f"SearchParams({', '.join(changed)})"


DEFAULTS = SearchParams()


def read_params(path: Path) -> SearchParams:
    """The parameters of a TOML file.

    Raises ParamsError where it cannot be read, or has an unknown key or a wrong value.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), SearchParams)
    except OSError as error:
        raise ParamsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # what is no UTF-8, no TOML, or does not fit
        raise ParamsError(f"{path}: {error}") from None
