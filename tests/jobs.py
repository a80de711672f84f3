"""Generated jobs and failures, for property tests of planner, checker and runtime."""

from hypothesis import strategies as st

from slipstream.planner.job.file import Job, parse_job
from slipstream.schedules.schedule import Worker


@st.composite
def jobs(
    draw, *, max_pipelines=4, max_stages=4, max_microbatches=6, max_chunks=2, memory=None
) -> Job:
    """Any small job.

    Times, counts per pipeline, placements and speeds are uneven; memory may be limited.
    """
    pipelines = draw(st.integers(1, max_pipelines))
    stages = draw(st.integers(1, max_stages))
    chunks = draw(st.integers(1, max_chunks))
    order = draw(
        st.sampled_from(["linear", "interleaved", "v", *([] if stages % 2 else ["bidirectional"])])
    )
    virtual = stages if order == "bidirectional" else stages * chunks
    ticks = st.one_of(
        st.integers(1, 6).map(lambda value: [value] * virtual),
        st.lists(st.integers(0, 6), min_size=virtual, max_size=virtual),
    )
    forward = draw(ticks.filter(any))
    counts = draw(
        st.lists(st.integers(1, max_microbatches), min_size=pipelines, max_size=pipelines)
    )
    lines = [
        f"pipelines = {pipelines}",
        f"stages = {stages}",
        f"microbatches = {counts}",
        "[placement]",
        f"order = '{order}'",
        *([] if order == "bidirectional" else [f"chunks = {chunks}"]),
        "[time]",
        f"forward = {forward}",
        f"backward_input = {draw(ticks)}",
        f"backward_weight = {draw(ticks)}",
        f"optimizer = {draw(st.integers(0, 5))}",
        f"all_reduce = {draw(st.integers(0, 2))}",
        f"transfer = {draw(st.integers(0, 2))}",
    ]
    if draw(st.integers(0, 4)) == 0:
        slow = Worker(draw(st.integers(0, pipelines - 1)), draw(st.integers(0, stages - 1)))
        lines.append(f"slow = {{'{slow}' = {draw(st.sampled_from([1.5, 2.0]))}}}")
    if draw(st.booleans()) if memory is None else memory:
        activation, stash = draw(st.integers(1, 2)), draw(st.integers(0, 3))
        room = (2 if order == "bidirectional" else chunks) * max(activation, stash) + draw(
            st.integers(0, 6)
        )
        lines += [
            "[memory]",
            f"capacity = {room}",
            f"activation = {activation}",
            f"weight_stash = {stash}",
        ]
    return parse_job("\n".join(lines))


@st.composite
def any_jobs(draw, *, max_pipelines=3, max_stages=3, max_microbatches=3, max_layers=3) -> Job:
    """Jobs with what users write, several features at once.

    They are layers of a stage and their values, stages and layers that cost nothing, decimal times,
    transfers longer than ops, reductions by stage, weights, shared state, rooms and speeds of
    single workers, large and unequal activations, recomputation, virtual stages, both directions,
    unequal numbers of micro-batches, nodes, reductions beside compute.
    """
    pipelines, stages = draw(st.integers(1, max_pipelines)), draw(st.integers(1, max_stages))
    order = draw(
        st.sampled_from(
            ["linear"] * 4 + ["interleaved", "v", *([] if stages % 2 else ["bidirectional"])]
        )
    )
    chunks = draw(st.sampled_from([1, 1, 2])) if order in ("interleaved", "v") else 1
    virtual = stages * chunks
    counts = draw(
        st.lists(st.integers(1, max_microbatches), min_size=pipelines, max_size=pipelines)
    )
    layers = draw(
        st.none() | st.lists(st.integers(1, max_layers), min_size=virtual, max_size=virtual)
    )
    total = virtual if layers is None else sum(layers)

    def values(numbers, length):
        """One for all, or each its own."""
        return draw(
            numbers.map(lambda value: [value] * length)
            | st.lists(numbers, min_size=length, max_size=length)
        )

    ticks = st.sampled_from([0, 0.1, 0.3, 1, 1, 2, 3, 1.7])
    some = st.just([1] * virtual) | st.lists(ticks, min_size=virtual, max_size=virtual).filter(any)
    worker = st.builds(Worker, st.integers(0, pipelines - 1), st.integers(0, stages - 1))

    def of_workers(numbers):
        return (
            "{"
            + ", ".join(
                f"'{name}' = {value}"
                for name, value in draw(st.dictionaries(worker, numbers, max_size=2)).items()
            )
            + "}"
        )

    lines = [
        f"pipelines = {pipelines}",
        f"stages = {stages}",
        f"microbatches = {counts}",
        "[placement]",
        f"order = '{order}'",
    ]
    if order != "bidirectional":
        lines.append(f"chunks = {chunks}")
    if layers is not None:
        lines.append(f"layers = {layers}")
    lines += [
        "[time]",
        f"forward = {draw(some)}",
        f"backward_input = {values(ticks, virtual)}",
        f"backward_weight = {values(ticks, virtual)}",
        f"optimizer = {values(st.sampled_from([0, 0, 0.5, 2]), virtual)}",
        f"transfer = {draw(st.sampled_from([0, 0, 0.1, 1, 5]))}",
    ]
    network = (
        [
            "overlap = true",
            f"latency = {draw(st.sampled_from([0, 0, 0.1]))}",
            f"slowdown = {draw(st.sampled_from([0, 0, 0.25]))}",
        ]
        if draw(st.integers(0, 4)) == 0
        else []
    )
    if network and draw(st.booleans()):
        network += ["bandwidth = 2", f"gradients = {values(st.sampled_from([0, 1, 3]), virtual)}"]
    else:
        lines.append(f"all_reduce = {values(st.sampled_from([0, 0, 0, 1]), virtual)}")
    if draw(st.integers(0, 2)) == 0:
        lines.append(f"slow = {of_workers(st.sampled_from([0.5, 1.001, 1.34, 2, 3]))}")
    if draw(st.booleans()):
        sizes = st.sampled_from([0, 0.5, 1, 1, 2, 7])
        activation, stash = values(sizes, virtual), values(sizes, virtual)
        least = 2 * chunks * max(*activation, *stash)
        room = st.sampled_from([least, 1.5 * least, 3 * least, least + 1])
        lines += [
            "[memory]",
            f"capacity = {values(room, stages)}",
            f"activation = {activation}",
            f"weight_stash = {stash}",
        ]
        lines += [
            f"{key} = {values(sizes, virtual)}"
            for key in ("weights", "state", "recomputed")
            if draw(st.integers(0, 2)) == 0
        ]
        if draw(st.integers(0, 2)) == 0:
            lines.append(f"capacity_of = {of_workers(room)}")
    if draw(st.integers(0, 2)) == 0:
        keys = draw(
            st.sets(
                st.sampled_from(
                    [
                        "forward",
                        "backward_input",
                        "backward_weight",
                        "optimizer",
                        "all_reduce",
                        "activation",
                        "weights",
                    ]
                )
            )
        )
        lines += [
            "[layers]",
            *(f"{key} = {values(st.sampled_from([0, 1, 1, 2, 5]), total)}" for key in sorted(keys)),
        ]
    if network:
        lines += ["[network]", *network]
    if draw(st.integers(0, 3)) == 0:
        lines += ["[topology]", f"workers_per_node = {draw(st.integers(1, pipelines * stages))}"]
    return parse_job("\n".join(lines))


def grid(
    pipelines: int, stages: int, microbatches: object, *, times: str = "", more: str = ""
) -> Job:
    """A plain job: F = I = W = 1 unless `times` says otherwise."""
    usual = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"
    return parse_job(
        f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
        f"[time]\n{times or usual}\n{more}"
    )


@st.composite
def failures(draw, job: Job) -> list[Worker]:
    """Some workers of the job, never all of a stage."""
    down: list[Worker] = []
    for column in range(job.stages):
        dead = draw(
            st.sets(st.integers(0, job.pipelines - 1), max_size=max(0, min(2, job.pipelines - 1)))
        )
        down += [Worker(pipeline, column) for pipeline in dead]
    return draw(st.permutations(down))[: draw(st.integers(0, len(down)))] if down else []
