"""A plan in a few lines for a reader: what it is, how good it is, what it moves, and what else could be done."""

from collections.abc import Sequence

from cli.shared.console import duration
from cli.shared.role_changes import role_change_lines
from planner.alternatives import Alternative
from planner.plan import Plan
from planner.transition import Transition, pays_after_iterations

NARROW = 0.01
"""A range of throughput that needs no explanation."""


def summary(made: Plan, moved: Transition) -> str:
    """The period, its proven bound, what the failures cost, and what has to move."""
    schedule = made.schedule
    bound = schedule.seconds(schedule.lower_bound_ticks)
    proof = "proven optimal" if schedule.status == "optimal" else \
        f"at most {max(schedule.gap, 1e-4):.2%} above the best possible (proven bound {duration(bound)})"
    lines = [f"period {duration(made.period)}, {proof}; planned in {duration(made.solve_seconds)}"
             + (", interrupted" if made.interrupted else "")]
    if made.evidence:
        lines.append(made.evidence)
    if schedule.failed:
        lines += _failures(made)
    if schedule.shed:
        lines.append(f"{schedule.shed} micro-batch runs go to workers with time to spare, though their own is alive")
    return "\n".join([*lines, *role_change_lines(schedule), *_moved(made, moved)])


def _failures(made: Plan) -> list[str]:
    schedule = made.schedule
    live, workers = len(schedule.seats), schedule.grid.pipelines * schedule.grid.columns
    share = f"with {live} of {workers} workers = {live / workers:.1%}"
    down = f"{', '.join(map(str, schedule.failed))} down: {schedule.rerouted} micro-batch runs re-routed to peers"
    if made.fault_free is None:
        return [down, f"{share}; throughput against fault-free is not known: there was no time to plan that"]
    whole = made.fault_free
    best, least = whole.period / made.period, whole.bound / made.period
    known = f"throughput {best:.1%} of fault-free (period {duration(whole.period)}), {share}"
    if f"{best:.1%}" == f"{least:.1%}" or whole.close:
        return [down, known]
    known = f"throughput between {least:.1%} and {best:.1%} of fault-free, {share}"
    if best - least < NARROW:
        return [down, known]
    return [down, known,
            f"the shortest fault-free period is between {duration(whole.bound)} and {duration(whole.period)}; with more"
            " time, or a plan without --failed first, it is known better"]


def _moved(made: Plan, moved: Transition) -> list[str]:
    """What the plan moves; empty where every worker holds what it held."""
    if not moved.layers:
        return []
    line = f"layers to move: {moved.layers}"
    if moved.bytes is not None and moved.seconds is not None:
        line += f", {moved.bytes / 1e9:.3g} GB in about {duration(moved.seconds)}"
    if made.fixed_period and made.fixed_period > made.period:
        line += f"; with layers in place the period is {duration(made.fixed_period)}"
    if (paid := pays_after_iterations(made, moved)) is not None:
        line += f", so that moving pays after {paid} iteration{'s' * (paid != 1)} at the latest"
    return [line]


def comparison(made: Plan, others: Sequence[Alternative], options: Sequence[str]) -> list[str]:
    """What else could be done, and the best of all. `options`: those of the command line that say what may move."""
    if not others or made.fault_free is None:
        return []
    said = []
    for other in sorted(others, key=lambda other: -other.throughput):
        text = f"{other.what} {other.throughput:.1%}"
        said.append(text + (f" ({other.option})" if other.option else
                            f" with {other.batch:.1%} of the batch" if other.batch < 1 else ""))
    own = made.fault_free.period / made.period
    best = max(reversed(others), key=lambda other: other.throughput)  # of equals the one that may do more
    lines = [f"instead, by quick plans: {'; '.join(said)}"]
    if best.throughput <= own * 1.0005:
        lines.append(f"best: this plan{' (' + ' '.join(options) + ')' if options else ''}, {own:.1%}")
    elif best.option:
        lines.append(f"best: {best.option}, {best.throughput:.1%} instead of {own:.1%}: the same command with "
                     f"{best.option}")
    else:
        lines.append(f"best, where a smaller batch will do: {best.what}, {best.throughput:.1%} instead of {own:.1%}")
        if (same := [other for other in others if other.option]) and \
                (second := max(same, key=lambda other: other.throughput)).throughput > own * 1.0005:
            lines[-1] += f"; with the whole batch {second.option}, {second.throughput:.1%}"
    return lines
