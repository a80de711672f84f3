"""Virtual stages: what the placements of the literature are for."""

import pytest

from slipstream.planner.job.file import JobError, parse_job
from slipstream.planner.plan import plan_job
from slipstream.schedules import codec
from slipstream.schedules.schedule import OpKind, Worker


def job(
    stages: int, microbatches: int, capacity: int, *, ticks: int, order: str, pipelines: int = 1
):
    """A job with F = I = W, where nothing else takes time.

    A micro-batch holds 1 at each virtual stage.
    """
    times = "\n".join(
        f"{key} = {ticks}" for key in ("forward", "backward_input", "backward_weight")
    )
    return parse_job(
        f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
        f"[placement]\n{order}\n[time]\n{times}\n"
        f"[memory]\ncapacity = {capacity}\nactivation = 1\nweight_stash = 1\n"
    )


def period(job, **options) -> int:
    return plan_job(job, **options).schedule.period_ticks


@pytest.mark.parametrize(("stages", "microbatches", "halves"), [(4, 8, 5), (4, 16, 5), (8, 16, 8)])
def test_v_shape_at_half_the_memory_has_no_more_bubbles_than_1f1b(stages, microbatches, halves):
    """Controllable memory (Qi et al.

    2024): a V of two chunks, each half a stage with half its activation.

    1F1B holds `stages` activations on its first worker, which are 2 * stages halves.
    """
    usual = job(stages, microbatches, stages, ticks=2, order="")
    shape = job(stages, microbatches, halves, ticks=1, order="chunks = 2\norder = 'v'")
    one_f_one_b = plan_job(usual, method="1f1b").schedule
    planned = plan_job(shape, method="greedy").schedule
    assert planned.seconds(planned.period_ticks) <= one_f_one_b.seconds(one_f_one_b.period_ticks)


def test_bidirectional_pipelines_fill_and_drain_from_both_ends():
    """Chimera (Li & Hoefler 2021) starts both ends at once.

    So the fill is half as long.
    """
    linear, both = (
        job(4, 4, 4, ticks=10, order=f"order = '{order}'") for order in ("linear", "bidirectional")
    )
    assert (period(linear), period(both)) == (15, 13)  # in ticks of 10; both are proven optimal
    assert both.chains == 2 and both.columns == (0, 1, 2, 3, 3, 2, 1, 0)


def test_copies_reduce_their_gradients_together():
    down = Worker(1, 2)
    schedule = plan_job(
        job(4, 5, 6, ticks=1, order="order = 'bidirectional'", pipelines=3), [down], method="greedy"
    ).schedule
    starts = {}
    for op in schedule.all_ops():
        if op.kind is OpKind.A:
            starts.setdefault(schedule.grid.original_stage(op.slice), set()).add(op.start_ticks)
    assert sorted(starts) == [0, 1, 2, 3] and all(len(times) == 1 for times in starts.values())
    # Each of its micro-batches passes the dead worker once, one way or the other; the worker of its
    # own pipeline that holds the same layers for the other direction may run some.
    assert 1 <= schedule.rerouted <= 5
    assert codec.decode(codec.encode(schedule)) == schedule


@pytest.mark.parametrize(
    ("stages", "more", "says"),
    [
        (3, "order = 'bidirectional'", "'bidirectional' with 3 stages; expected an even number"),
        (4, "order = 'bidirectional'\nchunks = 2", "'bidirectional' with chunks = 2"),
        (
            4,
            "order = 'bidirectional'\nlayers = [1, 2]",
            "placement.layers has 2 values; expected 4",
        ),
    ],
)
def test_what_cannot_run_both_ways_is_refused(stages, more, says):
    with pytest.raises(JobError, match=says):
        job(stages, 2, 9, ticks=1, order=more)
