"""The arrays of a problem say what the rules, times and assignment say."""

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.search.list_scheduler import ASSIGNMENT_RULES, assign_hosts
from slipstream.schedules.precedence import producers_with_rules
from tests.jobs import failures, jobs


@settings(max_examples=60)
@given(st.data(), jobs(), st.sampled_from(["split", "fused"]), st.sampled_from(ASSIGNMENT_RULES))
def test_arcs_durations_and_hops(data, job, backward, rule):
    problem = build_problem(job, data.draw(failures(job)), backward=backward)
    hosts = assign_hosts(problem, rule)
    arrays = ProblemArrays(problem, hosts)
    ops = arrays.ops
    keys = [(kind, *unit) for unit in arrays.units for kind in problem.op_kinds]
    follows = set()
    for op, (kind, stage, pipeline, microbatch) in enumerate(keys):
        unit = arrays.units[ops.unit[op]]
        assert (unit.slice, unit.pipeline, unit.microbatch) == (stage, pipeline, microbatch)
        host = hosts[unit]
        assert arrays.workers[ops.worker[ops.unit[op]]] == host
        assert ops.duration[op] == problem.op_ticks(kind, stage, host)
        arcs = ops.predecessors
        found = []
        for arc in range(arcs.start[op], arcs.start[op + 1]):
            before = keys[arcs.op[arc]]
            found.append((before, int(arcs.transfer[arc])))
            hop = (
                0 if hosts[arrays.units[ops.unit[arcs.op[arc]]]] == host else problem.times.transfer
            )
            assert arcs.hop[arc] == min(hop, arcs.transfer[arc])
            follows.add((int(arcs.op[arc]), op, int(arcs.transfer[arc]), int(arcs.hop[arc])))
        rules = producers_with_rules(
            (kind, stage, pipeline, microbatch), problem.grid.stages_of_microbatch(microbatch)
        )
        assert found == [(key, problem.times.transfer * bool(rule.tensor)) for key, rule in rules]
    arcs = ops.successors
    assert follows == {
        (op, int(arcs.op[arc]), int(arcs.transfer[arc]), int(arcs.hop[arc]))
        for op in range(len(keys))
        for arc in range(arcs.start[op], arcs.start[op + 1])
    }
    assert len(follows) == len(arcs.op) == len(ops.predecessors.op)
