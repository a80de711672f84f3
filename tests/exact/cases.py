"""Name the cases that were once answered wrongly."""

from typing import Any

from tests.exact.generate import Case, draw_case

ONES: dict[str, Any] = {"forward": 1, "backward_input": 1, "backward_weight": 1}


def job(
    pipelines: int,
    stages: int,
    microbatches: Any,
    time: dict[str, Any] | None = None,
    **tables: dict[str, Any],
) -> dict[str, Any]:
    """Return the contents of a job file."""
    return {
        "pipelines": pipelines,
        "stages": stages,
        "microbatches": microbatches,
        **tables,
        "time": time or ONES,
    }


REDUCED_IN_A_BUBBLE = Case(
    "own micro-batches",
    job(
        1,
        2,
        1,
        {**ONES, "all_reduce": 4, "transfer": 2},
        placement={"chunks": 2, "order": "interleaved"},
    ),
)
ROLES_EXCHANGED = Case(
    "roles", job(2, 2, 1, {**{key: [1, 2] for key in ONES}, "slow": {"0.1": 2}}), ((0, 0), (1, 1))
)
ROLES_WITH_ROOMS = Case(
    "roles",
    job(2, 2, 2, memory={"capacity": 2, "activation": 1, "capacity_of": {"0.1": 1}}),
    ((0, 0),),
)
ROLES_WITHOUT_ROOM = Case(
    "roles",
    job(
        2,
        2,
        2,
        memory={
            "capacity": 1,
            "activation": [0.5, 1],
            "weight_stash": [0.5, 1],
            "capacity_of": {"0.1": 0.5, "1.1": 0.5},
        },
    ),
    ((0, 0),),
)
"""No worker has room for its own role."""
ROLES_WITHOUT_ROOM_OF_THEIR_OWN = Case(
    "roles",
    job(
        1,
        2,
        3,
        memory={
            "capacity": 2,
            "activation": 1,
            "weight_stash": 1,
            "weights": [2, 1],
            "capacity_of": {"0.0": 0},
        },
    ),
)
"""Nobody has failed; lighter layers of another role leave a worker the room it lacks."""
BIDIRECTIONAL = Case(
    "whole stages",
    job(
        3,
        2,
        [1, 1, 2],
        {"forward": 2, "backward_input": 3, "backward_weight": 2, "optimizer": 3, "all_reduce": 4},
        placement={"order": "bidirectional"},
    ),
    ((0, 0), (2, 0)),
)
BIDIRECTIONAL_WITH_MEMORY = Case(
    "whole stages",
    job(
        2,
        2,
        1,
        {"forward": 0.87, "backward_input": 0.8, "backward_weight": 0.87, "optimizer": 0.34},
        memory={"capacity": 5.64, "activation": 0.94, "weight_stash": 0.5},
        placement={"order": "bidirectional"},
    ),
    ((0, 1),),
)
BIDIRECTIONAL_WITHOUT_A_COLUMN = Case(
    "whole stages", job(1, 2, 1, placement={"order": "bidirectional"}), ((0, 1),)
)
ONE_WORKER_WITHOUT_ROOM = Case(
    "whole stages",
    job(2, 1, 1, memory={"capacity": 1, "activation": 1, "capacity_of": {"0.0": 0.5}}),
)
DEAD_WORKER_WITHOUT_ROOM = ONE_WORKER_WITHOUT_ROOM._replace(failed=((0, 0),))
UNEQUAL_MICROBATCHES = Case("whole stages", job(3, 1, [4, 1, 1]))
LAYERS_OF_SLOW_WORKERS = Case(
    "any layers",
    job(
        1,
        2,
        1,
        {
            "forward": [1, 1],
            "backward_input": 1,
            "backward_weight": [0, 3],
            "slow": {"0.1": 3, "0.0": 1.337},
        },
        placement={"layers": [1, 3]},
        memory={"capacity": 1, "activation": 1, "weights": 2},
    ),
)
LAYERS_BESIDE_REDUCTIONS = Case(
    "any layers",
    job(
        1,
        3,
        3,
        {"forward": [1, 3, 3], "backward_input": 1, "backward_weight": [3, 0, 1], "transfer": 3},
        network={"overlap": True},
    ),
)
STASH_OF_NO_TIME = Case(
    "own micro-batches",
    job(
        1,
        2,
        2,
        {"forward": 3, "backward_input": [3, 1], "backward_weight": [0, 3], "transfer": 1},
        memory={"capacity": 2, "activation": 0.94, "weight_stash": 2},
    ),
)
WHOLE_MODELS = Case(
    "any layers",
    job(
        2,
        2,
        1,
        {**ONES, "transfer": 3},
        memory={"capacity": [4.1, 3], "activation": 2, "weight_stash": 1},
    ),
    ((1, 1),),
)
"""Two workers run one whole micro-batch each; the third has no room for that."""
REDUCED_IN_FINE_TICKS = Case(
    "whole stages",
    job(
        2,
        1,
        2,
        {
            "forward": 0.87,
            "backward_input": 0,
            "backward_weight": 0.34,
            "optimizer": 0.34,
            "all_reduce": 2.000001,
            "transfer": 0.34,
        },
        network={"overlap": True},
    ),
    ((1, 0),),
)
"""Ticks divide the compute, but not the reduction, whose layers were recorded in other ticks."""
ONE_LAYER_EACH = Case("any layers", job(1, 2, 2))

NAMED = {name: case for name, case in globals().items() if isinstance(case, Case)}
"""All cases by name whose plans are judged."""
CRASHES = {
    "placement": (
        Case(
            "any placement",
            job(
                1,
                2,
                3,
                {"forward": [1, 2], "backward_input": [0, 1.5], "backward_weight": 1},
                memory={"capacity": 4, "activation": 1},
                placement={"layers": [1, 3]},
            ),
        ),
        5_000,
    ),
    "odd memory": (
        Case(
            "own micro-batches",
            job(
                1,
                3,
                3,
                {
                    "forward": [0.87, 1.7, 0.333333333333],
                    "backward_input": [3.141592653589, 2.000001, 2.000001],
                    "backward_weight": [0.87, 0.333333333333, 0.333333333333],
                },
                memory={
                    "capacity": 1.333333333334,
                    "activation": 0.666666666667,
                    "weight_stash": 0.111111111111,
                },
            ),
        ),
        20_000,
    ),
    "no room": (draw_case(300_509, "any layers"), 20_000),
}
"""Cases whose planning ended in a crash, each with the number of steps."""
