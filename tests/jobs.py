"""Generated jobs and failures, for property tests of planner, checker and runtime."""

from hypothesis import strategies as st

from slipstream.planner.job.file import Job, parse_job
from slipstream.schedules.schedule import Worker


@st.composite
def jobs(draw, *, max_pipelines=4, max_stages=4, max_microbatches=6, max_chunks=2, memory=None) -> Job:
    """Any small job: uneven times, per-pipeline counts, placements, slow workers, and memory if it is to be limited."""
    pipelines = draw(st.integers(1, max_pipelines))
    stages = draw(st.integers(1, max_stages))
    chunks = draw(st.integers(1, max_chunks))
    order = draw(st.sampled_from(["linear", "interleaved", "v", *([] if stages % 2 else ["bidirectional"])]))
    virtual = stages if order == "bidirectional" else stages * chunks
    ticks = st.one_of(st.integers(1, 6).map(lambda value: [value] * virtual),
                      st.lists(st.integers(0, 6), min_size=virtual, max_size=virtual))
    forward = draw(ticks.filter(any))
    counts = draw(st.lists(st.integers(1, max_microbatches), min_size=pipelines, max_size=pipelines))
    lines = [f"pipelines = {pipelines}", f"stages = {stages}", f"microbatches = {counts}",
             "[placement]", f"order = '{order}'", *([] if order == "bidirectional" else [f"chunks = {chunks}"]),
             "[time]", f"forward = {forward}", f"backward_input = {draw(ticks)}", f"backward_weight = {draw(ticks)}",
             f"optimizer = {draw(st.integers(0, 5))}", f"all_reduce = {draw(st.integers(0, 2))}",
             f"transfer = {draw(st.integers(0, 2))}"]
    if draw(st.integers(0, 4)) == 0:
        slow = Worker(draw(st.integers(0, pipelines - 1)), draw(st.integers(0, stages - 1)))
        lines.append(f"slow = {{'{slow}' = {draw(st.sampled_from([1.5, 2.0]))}}}")
    if draw(st.booleans()) if memory is None else memory:
        activation, stash = draw(st.integers(1, 2)), draw(st.integers(0, 3))
        room = (2 if order == "bidirectional" else chunks) * max(activation, stash) + draw(st.integers(0, 6))
        lines += ["[memory]", f"capacity = {room}", f"activation = {activation}", f"weight_stash = {stash}"]
    return parse_job("\n".join(lines))


def grid(pipelines: int, stages: int, microbatches: object, *, times: str = "", more: str = "") -> Job:
    """A plain job: F = I = W = 1 unless `times` says otherwise."""
    usual = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"
    return parse_job(f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
                     f"[time]\n{times or usual}\n{more}")


@st.composite
def failures(draw, job: Job) -> list[Worker]:
    """Some workers of the job, never all of a stage."""
    down: list[Worker] = []
    for column in range(job.stages):
        dead = draw(st.sets(st.integers(0, job.pipelines - 1), max_size=max(0, min(2, job.pipelines - 1))))
        down += [Worker(pipeline, column) for pipeline in dead]
    return draw(st.permutations(down))[:draw(st.integers(0, len(down)))] if down else []
