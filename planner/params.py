"""Parameters of the searches, with the values that did best on benchmarks.quality and benchmarks.layers.

A file of these (`slipstream plan --params FILE`) is TOML with a table for each group; a key that is left out keeps the
value below:

    [annealing]
    aim = 0.4
    [cp_sat]
    largest_proof = 0

Shares are of the time, or the steps, left at that point. Ops are compute ops: F, I and W, or F and B.
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
"""Name of a field of a dispatch rule (`planner.search.list_scheduler.DispatchRule`)."""
Changes = Annotated[tuple[tuple[Field, AtLeastOne], ...], Meta(min_length=1)]


class ParamsError(ValueError):
    """Error for a file of parameters that cannot be read. The message names the file, the key and what is expected."""


class Choice(NamedTuple):
    """Assignment rule and dispatch rule of the shortlist."""

    assignment: Annotated[int, Meta(ge=0, le=3)]
    """Index of the assignment rule in `ASSIGNMENT_RULES`."""
    limits: tuple[float, int] | None
    """Slope and extra of the limits on micro-batches in flight (`scale_in_flight_limits`).

    None: there are no limits, and the order is chosen as if transfers took no time.
    """
    lookahead: float
    make_room: bool


class LayoutChoice(NamedTuple):
    """Fields of a dispatch rule for layouts; `fill_wait` is a share of an F."""

    forward_order: Literal["deepest", "oldest"]
    lookahead: float
    fill_wait: float
    forward_lookahead: float
    advance: float
    gradient_advance: float


class ListParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of list schedules: a grid of dispatch rules under several assignments, then random steps from the best
    rules."""

    share: Share = 0.3
    """Share of the time for list schedules, if other searches follow and there is one candidate."""
    most_steps: Count = 1000
    """Maximum number of random steps for one problem."""
    fewest_steps: Count = 8
    """Number of random steps that a search may take however large the problem is, while there is time."""
    most_ops: Count = 20_000_000
    """Maximum number of ops that all random steps of a problem together may schedule."""
    starts: AtLeastOne = 4
    """Number of the best rules of the grid from which random steps start."""
    stale_steps: AtLeastOne = 150
    """Number of consecutive random steps without improvement after which they restart from one of the best rules."""
    stale_starts: AtLeastOne = 10
    """Number of consecutive restarts without improvement after which the search ends."""
    grid_share: Share = 0.3
    """Share of the time for the grid, if the random steps may also change the assignment."""
    assignment_steps: Share = 0.5
    """Share of the random steps that change the assignment."""
    changes: Changes = (
        ("in_flight", 28), ("fill_wait", 15), ("lookahead", 14), ("forward_lookahead", 7), ("places", 6),
        ("gradient_places", 6), ("ignore_transfers", 6), ("load_share", 4), ("make_room", 3), ("rerouted", 2))
    """Fields of a rule that a random step changes, with their weights. Half of a weight is how often a change of the
    field made a plan shorter; the other half is mostly on limits in flight. The mean of both did best on the grids of
    benchmarks.quality."""
    changes_of_layouts: Changes = (
        ("fill_wait", 25), ("places", 12), ("gradient_places", 12), ("gradient_advance", 12), ("lookahead", 12),
        ("forward_lookahead", 9), ("advance", 6), ("in_flight", 6), ("ignore_transfers", 2), ("make_room", 1))
    """Fields that a random step changes if a layout is ordered, weighted by how often each made a plan of
    benchmarks.layers shorter."""
    changes_twice: Share = 0.3
    """Share of the random steps that change two fields."""
    load_shares: Annotated[tuple[float, ...], Meta(min_length=1)] = (0.0, 0.5, 1.0, 1.5, 2.0)
    """Values from which `DispatchRule.load_share` is drawn."""
    places: Annotated[tuple[float, ...], Meta(min_length=1)] = (-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0)
    """Values from which the number of places is drawn by which a micro-batch goes before its turn; negative: after
    it."""
    least_advance: int = -32
    """Smallest value that is drawn for `DispatchRule.advance`, as a multiple of 1 / `fractions`."""
    most_advance: int = 48
    """Largest value that is drawn for `DispatchRule.advance`, as a multiple of 1 / `fractions`."""
    fractions: AtLeastOne = 8
    """Denominator of the advances and shares that are drawn."""
    shortlist: Annotated[tuple[Choice, ...], Meta(min_length=1)] = tuple(itertools.starmap(Choice, (
        (0, (2.0, 0), 0.0, False), (1, (1.5, 0), 0.5, True), (1, None, 0.0, False), (0, (1.0, 0), 1.0, True),
        (0, (1.25, 0), 0.0, False), (1, (1.0, 0), 0.5, True), (0, (2.0, 1), 0.0, False), (1, (1.25, 1), 0.5, True),
        (0, (1.5, 0), 0.5, False), (0, (1.25, 0), 0.5, False), (1, (1.0, 2), 0.5, True), (0, (1.0, 2), 1.0, True),
        (1, (2.0, 0), 0.0, False), (1, (1.0, 1), 1.0, False))))
    """Choices that are tried before the grid. They are the fewest whose best was the best of all choices on 31 jobs
    with failures and little, more and much memory. The first is for much memory."""
    shortlist_of_layouts: tuple[LayoutChoice, ...] = tuple(itertools.starmap(LayoutChoice, (
        ("oldest", 0.5, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 0.5, 4.0), ("deepest", 0.0, 1.0, 0.0, 0.0, 0.0),
        ("oldest", 0.25, 0.5, 0.5, 2.0, 2.0), ("deepest", 0.0, 0.25, 0.0, 0.0, 0.0),
        ("oldest", 0.5, 0.5, 0.0, 2.0, 2.0), ("deepest", 0.25, 0.5, 0.5, 0.0, 0.0),
        ("oldest", 0.25, 0.5, 0.5, 0.0, 0.0), ("deepest", 0.0, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 2.0, 2.0),
        ("deepest", 0.5, 0.5, 0.5, 2.0, 0.0), ("oldest", 0.25, 0.5, 0.5, -1.0, 4.0),
        ("oldest", 0.0, 0.5, 0.0, 2.0, 2.0), ("oldest", 0.5, 0.5, 0.0, 0.0, 0.0),
        ("deepest", 0.5, 0.5, 0.0, 0.0, 0.0))))
    """Choices that are tried for layouts before `shortlist`. They are the best rules of a grid on instances of
    benchmarks.layers, the most frequent winners first."""
    largest_untimed: Count = 20_000
    """Number of ops up to which the baseline schedules are also tried after the time is up."""


class PieceParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of pieces, which are planned separately: pipelines that have lost workers, with whole ones that help
    them."""

    largest: Count = 60_000
    """Number of ops up to which a piece gets more whole pipelines than it needs."""
    shedding: Count = 3
    """Factor on the number of whole pipelines of a piece if live workers may hand on their own micro-batches."""
    largest_shedding: Count = 6_000
    """Number of ops up to which a piece gets `shedding` times as many whole pipelines."""
    few: Count = 2
    """Number of micro-batches for each stage below which live workers may hand on their own. With so few, one more
    micro-batch on a worker delays all others of its pipeline."""


class Cooling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of one cooling cycle of annealing."""

    hot: Factor
    """Temperature at the beginning, in mean op lengths."""
    cold: Factor
    """Temperature at the end, in mean op lengths."""
    pull: Number
    """Weight of the sum by which all windows exceed the goal of the cycle. A large weight leads away from plateaus
    where many windows are the longest."""
    begin: Share = 0.0
    """Start of the part of the plan that may change, as a share of its length."""
    end: Share = 1.0
    """End of the part of the plan that may change, as a share of its length. Pipelines that fill or drain bear higher
    temperatures than the rest."""


class AnnealingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of simulated annealing of the order of ops and of the workers that run them."""

    cycles: Annotated[tuple[Cooling, ...], Meta(min_length=1)] = (
        Cooling(hot=0.15, cold=0.02, pull=3.0), Cooling(hot=1.0, cold=0.1, pull=3.0, end=0.3),
        Cooling(hot=1.0, cold=0.1, pull=3.0, begin=0.7), Cooling(hot=0.3, cold=0.1, pull=10.0),
        Cooling(hot=0.3, cold=0.1, pull=30.0))
    """Cooling cycles, run in turn; none is the best on all jobs. The first must be of the whole plan. After all of
    them, the number of steps doubles."""
    steps_per_op: AtLeastOne = 60
    """Steps of each of the first cycles, for each op."""
    ops_per_cycle: AtLeastOne = 800_000_000
    """Maximum product of the steps of a first cycle and the ops of one pipeline."""
    fewest_steps: AtLeastOne = 2_000
    """Minimum number of steps of a cycle."""
    aim: Share = 0.5
    """Share of the way from the best plan's period to the bound: only windows longer than that count in a cycle."""
    steps_per_round: AtLeastOne = 10_000
    """Maximum number of steps between two reads of the clock, which take some 50 ms."""
    ops_per_round: AtLeastOne = 30_000_000
    """Maximum product of the steps between two reads of the clock and the ops of one pipeline."""
    trade: Share = 2 / 24
    """Share of the steps in which two units of a slice trade workers and places, if units may change workers."""
    move: Share = 1 / 24
    """Share of the steps in which a unit moves to another worker; all others exchange neighbouring runs of ops."""
    steps_per_shift: AtLeastOne = 60
    """Number of steps, for each pipeline of a piece, of which one shifts a deadline."""
    ops_per_shift: AtLeastOne = 8
    """Divisor of the ops of a piece that gives the least number of steps of which one shifts a deadline. It matters for
    large pieces: a shift recomputes the times of all ops."""
    largest_run: AtLeastOne = 6
    """Maximum number of ops in a run of neighbours that exchanges places with another run."""
    longest_jump: AtLeastOne = 16
    """Maximum number of ops that a single op jumps over."""
    margin: Number = 0.3
    """Amount by which a window may become longer if others may become shorter, in mean op lengths."""
    steps_per_path: AtLeastOne = 16
    """Maximum number of steps that try ops of one critical path, so that all critical paths are tried."""
    ops_per_step: AtLeastOne = 8
    """Divisor of the ops of a piece that gives the number of steps after which all heads (earliest starts) are
    recomputed.

    So recomputing takes no longer than the steps themselves.
    """
    chains: AtLeastOne = 2
    """Number of chains of a piece, which run in parallel threads; constant, so that no plan depends on the machine."""
    spare_units: Count = 8
    """Number of units that a worker may run beyond those of the busiest worker at the start."""
    begin_seconds: Number = 12e-6
    """Seconds for each op to begin, to run one round and to time the result; with less time left, annealing does not
    begin."""

    def __post_init__(self) -> None:
        if self.trade + self.move > 1:
            raise ValueError(f"annealing: trade + move is {self.trade + self.move:g}; expected at most 1")


class CpSatParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of CP-SAT, which proves bounds and improves plans of small pieces."""

    largest_proof: Count = 1500
    """Number of ops, each counted once for each worker that may run it, up to which CP-SAT improves a piece and proves
    it optimal."""
    proof_share: Share = 0.6
    """Share of the time left that CP-SAT may spend on each piece."""
    largest_relaxed: Count = 1000
    """Number of ops up to which linear relaxations pay: proofs end a third sooner. In larger models they exceed the
    time limit by seconds and prove nothing (the worked example; 8 pipelines x 8 stages x 16 micro-batches)."""
    hint_cycles: AtLeastOne = 3
    """Number of cooling cycles of annealing that make a good hint for CP-SAT."""


class LayoutParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of candidates: the problem with layers in place, and layouts that cut micro-batches or move layers."""

    quick_share: Share = 0.2
    """Share of the time, by the clock, for a plan by list schedules alone, if layers may move; the search is never
    worse."""
    most: AtLeastOne = 17
    """Maximum number of layouts that are considered."""
    fewest: Count = 4
    """Minimum number of layouts that a search by list schedules alone considers, however short the time."""
    seconds: Factor = 6e-5
    """Seconds for each micro-batch at a stage that a search by list schedules alone needs for each layout."""
    share: Share = 0.4
    """Share of the time for a few list schedules of all candidates."""
    first_share_fixed: Share = 0.25
    """Share of the list schedules' time for the problem with layers in place, if layers may not move."""
    first_share_move: Share = 0.1
    """Share of the list schedules' time for the problem with layers in place, if layers may move."""
    first: Number = 2.0
    """Factor on each layout's equal share of the time for list schedules, since many a later layout cannot be the
    best."""
    undivided: AtLeastOne = 8
    """Number of pipelines up to which layouts are made of all together; with more, they are made group by group."""
    most_helpers: Count = 16
    """Maximum number of whole pipelines in the group of a re-cut replica."""
    fewer_helpers: Share = 0.005
    """Share by which the longest load of a group may be longer with fewer whole pipelines."""
    largest_shared: Count = 100_000
    """Product of micro-batches and stages up to which layouts that are not divided into groups are made."""
    parts: AtLeastOne = 4
    """Number of parts into which a stage is cut for short slices."""
    few_parts: AtLeastOne = 2
    """Smaller number of parts, which is tried first."""
    largest_fine: Count = 40_000
    """Product of micro-batches and parts of stages up to which stages are cut for short slices."""
    separate_parts: AtLeastOne = 3
    """Number of parts for micro-batches that are spread separately: thirds are the best most often."""
    finest_parts: AtLeastOne = 6
    """Number of parts that is tried, too, if the job is small."""
    largest_finest: Count = 10_000
    """Product of micro-batches and parts of stages up to which `finest_parts` is tried."""
    least_share: Share = 0.25
    """Minimum share of a stage that a worker takes of a micro-batch that is spread separately. Shorter slices wait
    longer than they take."""
    fewer_sets: Share = 0.01
    """Share of the period by which loads may be longer than with fewer and larger separate sets of replicas."""
    fine_rate: Number = 10_000.0
    """Product of micro-batches and parts of stages up to which short slices are tried, for each second of list
    schedules."""
    small_share: Share = 0.25
    """Share of the time left after the list schedules for the problem with layers in place, if CP-SAT can improve
    it."""
    restarts: Rounds = ((7, 0.25), (3, 0.35))
    """Rounds of random steps from the best list schedules of the most promising layouts, one after the other. A round
    is (number of layouts, share of the time left that they have together)."""
    large_restarts: Rounds = ((7, 0.4), (3, 0.5))
    """Rounds of random steps, as in `restarts`, if a layout has more than `largest_annealed` ops."""
    largest_annealed: Count = 15_000
    """Number of ops of a layout beyond which annealing could change but a few of them in the time."""
    restart_steps: Count = 10_000
    """Maximum number of such random steps for a layout."""
    largest_alone: Count = 5_000
    """Number of ops up to which a list schedule spends at least half of its time in the interpreter. Larger layouts run
    their random steps in two threads."""
    halvings: Rounds = ((7, 0.25), (2, 0.3))
    """Rounds of annealing of the most promising candidates: (number of candidates, share of the time left for them
    together). Then one candidate has the rest (successive halving, Karnin et al. 2013)."""
    again: Number = 3.0
    """Multiple of the gain of a candidate's last annealing that it is expected to gain again."""


class BlockParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of jobs that are planned in blocks of micro-batches, and of the work around a search."""

    certain: Count = 50_000
    """Number of compute ops that any machine plans and checks in less than a second; up to it, no speed is measured."""
    quick: Count = 20_000
    """Number of compute ops up to which no speed is measured if a plan may not exceed its time limit (no grace)."""
    sample: AtLeastOne = 21_000
    """Number of compute ops of the part of a job by which speed is measured."""
    grace_seconds: Number = 1.0
    """Seconds by which a plan may exceed its time limit; the larger of this and `grace_share` counts."""
    grace_share: Number = 0.2
    """Share of the time limit by which a plan may exceed it."""
    margin: Factor = 1.25
    """Factor on the measured time of each op when blocks are joined, since large jobs take longer for each op."""
    whole_margin: Factor = 1.75
    """Factor on the measured time of each op when a job is planned without blocks."""
    share: Share = 0.3
    """Share of the time that the first plan of all blocks may take; the rest improves it."""
    largest_moved: Count = 500_000
    """Number of compute ops up to which a job whose layers may move is never cut into blocks: layers cannot move in
    blocks."""
    largest_baseline: Count = 200_000
    """Number of compute ops up to which a baseline assigns the micro-batches of the dead among all pipelines, not in
    groups."""
    piecewise: Count = 30_000
    """Number of compute ops up to which a job whose period alone is needed is put together, not evaluated piece by
    piece."""
    recomputed_share: Share = 0.2
    """Share of the time for the choice of the stages that recompute their activations."""
    largest_compared: Count = 50_000
    """Number of compute ops up to which there is time to plan alternatives."""
    reference_share: Share = 0.15
    """Share of the time that the fault-free plan, needed for comparison, may take."""
    finish_seconds: Number = 15e-6
    """Seconds for each op that are reserved to put a plan together and check it."""
    finish_share: Share = 0.4
    """Maximum share of the time that is reserved to put a plan together and check it."""


class RoleParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of the choice of vacant roles, if live workers may take over other roles."""

    exhaustive: Count = 60
    """Number of patterns of a number of failures up to which all are planned."""
    distributions: AtLeastOne = 4
    """Number of distributions of failures over columns that the dynamic programme stores."""
    compared: Share = 0.3
    """Share of the time to compare all candidates, and again to compare the best few; the best has the rest."""
    finalists: AtLeastOne = 3
    """Number of candidates that are compared again."""
    share: Share = 0.5
    """Share of the time for plans with moved roles; the rest is for a plan with layers in place."""
    share_of_layers: Share = 0.25
    """Share of the time for plans with moved roles; the rest is for a plan with layers moved."""


class OverlapParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of plans whose reductions overlap compute (`[network] overlap`)."""

    cut: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (1, 2, 3, 4, 6, 8, 12, 16, 24)
    """Numbers of micro-batches, the last ones of each worker, that are cut into layers, ascending; the best number is
    used."""
    few: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (2, 6, 16)
    """Numbers from `cut` that are tried first; then the neighbours of the best one are tried while they are better."""
    pieces: Annotated[tuple[AtLeastOne, ...], Meta(min_length=1)] = (32, 8, 4, 2)
    """Maximum numbers of pieces into which layers that are reduced together are divided. Only the first is tried if a
    reduction has no latency."""
    share: Share = 0.5
    """Share of the time of reductions that occupies workers in the second search."""
    first_share_fixed: Share = 0.5
    """Share of the time for the search without reductions if layers stay in place: its plan is often proven to be the
    best."""
    first_share_move: Share = 0.2
    """Share of the time for the search without reductions if layers may move."""
    largest: Count = 200_000
    """Number of ops up to which all numbers in `cut` are tried; with more, only the middle one."""


class FailureParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of plans for failures that are made while a run continues."""

    at_once_seconds: Factor = 0.3
    """Time limit of a plan for which all workers wait. If none is found in it, the first plan is used."""
    meanwhile_seconds: Factor = 2.0
    """Time limit of a plan for other speeds, for which no worker waits."""
    large_seconds: Factor = 10.0
    """Time limit of a plan that is too large to be put together within the other limits."""
    roles_seconds: Factor = 10.0
    """Time limit of a plan in which workers take over other roles: several are planned."""
    settled_seconds: Factor = 10.0
    """Time limit of a settled plan, which is made while all workers train."""
    pause_pays_seconds: Factor = 3600.0
    """Time within which a schedule with moved roles must make up for the pause in which their layers are loaded."""
    joining_seconds: Factor = 1.0
    """Seconds by which that pause is longer than the loading of the layers."""
    large: Count = 30_000
    """Number of ops above which no micro-batch is cut in a plan, because the search for cuts takes longer than they
    save."""
    largest: Count = 500_000
    """Number of ops up to which a plan without cuts is found within seconds; the first one found is used."""


class SearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, repr_omit_defaults=True):
    """Parameters of all searches, in groups."""

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
        """Return only the groups that differ from the usual values."""
        usual = DEFAULTS
        changed = [f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__
                   if getattr(self, name) != getattr(usual, name)]
        return f"SearchParams({', '.join(changed)})"


DEFAULTS = SearchParams()


def read_params(path: Path) -> SearchParams:
    """Read the parameters of a TOML file.

    Raises ParamsError if the file cannot be read, or has an unknown key or a wrong value.
    """
    try:
        return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), SearchParams)
    except OSError as error:
        raise ParamsError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # what is no UTF-8, no TOML, or does not fit
        raise ParamsError(f"{path}: {error}") from None
