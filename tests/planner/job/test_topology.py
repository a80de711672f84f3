"""Which workers share a node.

The table is read exactly, written back, and refused in one line where it is wrong.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planner.job.file import JobError, parse_job, topology_table, workers_of_nodes
from slipstream.planner.job.toml import job_text
from slipstream.schedules.schedule import Worker

GRID = "pipelines = 2\nstages = 3\nmicrobatches = 4\n"
TIME = "[time]\nforward = 1\nbackward_input = 1\nbackward_weight = 1\n"


def nodes(topology, *, pipelines=2, stages=3):
    grid = f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = 4\n"
    return parse_job(f"{grid}{TIME}{topology}").nodes


def test_without_a_topology_nothing_is_said():
    assert nodes("") == ()


@pytest.mark.parametrize(
    ("size", "names"),
    [
        (2, ["0.0 0.1", "0.2 1.0", "1.1 1.2"]),
        (3, ["0.0 0.1 0.2", "1.0 1.1 1.2"]),
        (4, ["0.0 0.1 0.2 1.0", "1.1 1.2"]),
    ],
)
def test_neighbours_in_the_grid_share_a_node(size, names):
    assert [
        " ".join(map(str, node)) for node in nodes(f"[topology]\nworkers_per_node = {size}\n")
    ] == names


def test_all_workers_of_nodes_are_found_once():
    shared = nodes('[topology]\nnode = [["1.2", "0.0"], ["0.1"], ["0.2", "1.0", "1.1"]]\n')
    assert shared[0] == (Worker(0, 0), Worker(1, 2))
    assert workers_of_nodes(shared, [1, 0, 1], "--failed-node") == (
        Worker(0, 0),
        Worker(0, 1),
        Worker(1, 2),
    )
    assert workers_of_nodes((), [], "--failed-node") == ()


@pytest.mark.parametrize(
    ("topology", "says"),
    [
        ("topology = 3", "topology is 3; expected a table"),
        (
            "[topology]",
            "topology has neither of the keys 'workers_per_node' and 'node'; expected one of them",
        ),
        ("[topology]\nworkers_per_node = 2\nnode = []", "topology has both of the keys"),
        (
            "[topology]\nworker_per_node = 2",
            "unknown key 'topology.worker_per_node'; did you mean 'topology.workers_per_node'?",
        ),
        ("[topology]\nnodes = []", "unknown key 'topology.nodes'; did you mean 'topology.node'?"),
        ("[topolgy]\nnode = []", "unknown key 'topolgy'; did you mean 'topology'?"),
        (
            "[topology]\nworkers_per_node = 7",
            "topology.workers_per_node is 7; expected a whole number, 1 to 6",
        ),
        (
            "[topology]\nworkers_per_node = true",
            "topology.workers_per_node is True; expected a whole number",
        ),
        (
            "[topology]\nnode = 2",
            "topology.node is 2; expected a list of nodes, each a list of its workers, such as [[",
        ),
        ("[topology]\nnode = ['0.0']", "topology.node[0] is '0.0'; expected a list of nodes"),
        ("[topology]\nnode = [[]]", "topology.node[0] is []; expected a list of nodes"),
        (
            "[topology]\nnode = [[0.1]]",
            "topology.node[0] has 0.1; expected a worker as a text, PIPELINE.STAGE",
        ),
        (
            "[topology]\nnode = [['0-1']]",
            "topology.node[0]: '0-1' is not a worker: write PIPELINE.STAGE",
        ),
        (
            "[topology]\nnode = [['0.0'], ['2.0']]",
            "topology.node[1]: the job has no worker 2.0; expected pipeline 0 to 1",
        ),
        (
            "[topology]\nnode = [['0.0'], ['0.1', '0.0']]",
            "topology.node[1]: worker 0.0 is in node 0 already",
        ),
        (
            "[topology]\nnode = [['0.0', '0.1', '0.2'], ['1.0', '1.1']]",
            "topology.node: worker 1.2 is in no node",
        ),
    ],
)
def test_mistakes_are_named_in_one_line(topology, says):
    with pytest.raises(JobError, match=r"^job\.toml: ") as refused:
        parse_job(
            f"{GRID}{topology}\n{TIME}"
            if "[" not in topology.partition("=")[0]
            else f"{GRID}{TIME}{topology}\n",
            "job.toml",
        )
    assert says in str(refused.value) and "\n" not in str(refused.value)


@given(data=st.data(), pipelines=st.integers(1, 4), stages=st.integers(1, 4))
def test_any_division_of_the_workers_is_read_and_written_back(data, pipelines, stages):
    workers = data.draw(
        st.permutations(
            [Worker(row, column) for row in range(pipelines) for column in range(stages)]
        )
    )
    ends = (
        sorted(data.draw(st.sets(st.integers(1, len(workers) - 1))) | {len(workers)})
        if len(workers) > 1
        else [1]
    )
    division = tuple(
        tuple(sorted(workers[first:end])) for first, end in zip([0, *ends], ends, strict=False)
    )
    names = [list(map(str, node)) for node in division]
    text = job_text({"topology": {"node": names}}, {})
    assert nodes(text, pipelines=pipelines, stages=stages) == division
    again = job_text({"topology": topology_table(division, pipelines, stages)}, {})
    assert nodes(again, pipelines=pipelines, stages=stages) == division


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats(allow_nan=False)
        | st.sampled_from(["0.0", "0.1", "1.0", "9.9", "x"]),
        lambda inner: st.lists(inner, max_size=4),
        max_leaves=8,
    ).filter(lambda value: "None" not in repr(value))
)
def test_any_value_is_a_division_or_refused(value):
    text = job_text({"topology": {"node": value}}, {})
    try:
        shared = nodes(text, stages=2)
    except JobError as error:
        assert "\n" not in str(error)
        return
    workers = [Worker(row, column) for row in range(2) for column in range(2)]
    assert sorted(worker for node in shared for worker in node) == workers
