"""A worker's program says what the schedule says.

Its order lets nobody wait for ever.
"""

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.schedules.check import check
from slipstream.schedules.forwards import schedule_forwards
from slipstream.schedules.precedence import op_key, producers_with_rules
from slipstream.schedules.program import (
    RECEIVES,
    Instruction,
    ProgramError,
    TransferKind,
    build_program,
)
from slipstream.schedules.schedule import COMPUTE_KINDS, OpKind, Worker
from tests.general import floating_layer, general_schedules, layers_moved
from tests.generate import BROKEN, HEALTHY, by_hand, schedules
from tests.jobs import grid
from tests.runtime.running import schedule_for

TAKERS = OpKind.F, OpKind.I, OpKind.B


def crossings(schedule):
    """Tensors between workers, from the rules alone.

    Each is (kind of op that takes it, slice, micro-batch, from, to).
    """
    ops = {op_key(op): op for op in schedule.all_ops() if op.kind in COMPUTE_KINDS}
    return Counter(
        (op.kind, op.slice, op.pipeline, op.microbatch, ops[producer].worker, op.worker)
        for key, op in ops.items()
        for producer, rule in producers_with_rules(key, schedule.route_of(*key[2:]))
        if rule.tensor and ops[producer].worker != op.worker
    )


def require_programs(schedule):
    programs = {seat.worker: build_program(schedule, seat.worker) for seat in schedule.seats}
    received = Counter()
    ends = Counter()
    for worker, program in programs.items():
        done = Counter((op.kind, op.slice, op.pipeline, op.microbatch) for op in program.ops)
        assert done == Counter(
            (op.kind, op.slice, op.pipeline, op.microbatch) for op in schedule.ops(worker)
        )
        assert program.holds == schedule.held_layers(worker) and program.members == schedule.members
        for place, instruction in enumerate(program.instructions):
            assert Instruction.parse(str(instruction)) == instruction and len(str(instruction)) < 60
            if instruction.kind in RECEIVES:
                taker = next(
                    later
                    for later in program.instructions[place:]
                    if later.kind in TAKERS
                    and (later.slice, later.pipeline, later.microbatch)
                    == (instruction.slice, instruction.pipeline, instruction.microbatch)
                    and (later.kind is OpKind.F) == (instruction.kind is TransferKind.RECV_F)
                )
                assert (taker.slice, taker.pipeline, taker.microbatch) == (
                    instruction.slice,
                    instruction.pipeline,
                    instruction.microbatch,
                )
                received[
                    taker.kind,
                    instruction.slice,
                    instruction.pipeline,
                    instruction.microbatch,
                    instruction.peer,
                    worker,
                ] += 1
                ends[instruction.peer, worker, instruction.number] += 1
            elif isinstance(instruction.kind, TransferKind):
                ends[worker, instruction.peer, instruction.number] += 1
    assert received == crossings(schedule) and set(ends.values()) <= {2}
    assert sum(ends.values()) == 2 * sum(received.values())
    require_end(schedule, programs)


def require_end(schedule, programs):
    """All come to the end, with transfers that wait for both ends.

    Each worker makes one at a time.

    An all-reduce waits for all that take part, unless it runs beside compute.
    """
    instructions_left = {
        worker: deque(program.instructions) for worker, program in programs.items()
    }
    summed = Counter()
    freed = Counter()
    sharers = {layers: workers for program in programs.values() for layers, workers in program.sums}
    moves = True
    while moves:
        moves = False
        for worker, program in programs.items():
            while instructions_left[worker]:
                instruction = instructions_left[worker][0]
                if isinstance(instruction.kind, TransferKind):
                    other = (
                        instructions_left[instruction.peer][0]
                        if instructions_left[instruction.peer]
                        else None
                    )
                    if other is None or other.peer != worker or other.number != instruction.number:
                        break
                    receives, sends = (
                        (instruction, other)
                        if instruction.kind in RECEIVES
                        else (other, instruction)
                    )
                    assert receives.kind in RECEIVES and sends.kind not in RECEIVES
                    target, source = (
                        (worker, instruction.peer)
                        if instruction is receives
                        else (instruction.peer, worker)
                    )
                    freed[source, target] += 1
                    assert receives.frees <= freed[target, source]
                    instructions_left[instruction.peer].popleft()
                elif instruction.kind is OpKind.A and not schedule.has_overlap:
                    layers = program.layers_of(instruction.slice)
                    if (worker, layers) not in summed:
                        summed[worker, layers] += 1
                    if not all((other, layers) in summed for other in sharers[layers]):
                        break
                instructions_left[worker].popleft()
                moves = True
    assert not any(instructions_left.values()), {
        worker: str(rest[0]) for worker, rest in instructions_left.items() if rest
    }


@settings(max_examples=60, deadline=None)
@given(schedules(), st.booleans())
def test_of_whole_stages_with_failures_in_any_placement(schedule, only_forwards):
    require_programs(schedule_forwards(schedule) if only_forwards else schedule)


@settings(max_examples=60, deadline=None)
@given(general_schedules(), st.booleans())
def test_of_any_holdings_and_routes(schedule, only_forwards):
    require_programs(schedule_forwards(schedule) if only_forwards else schedule)


OVERLAPPED = "[network]\noverlap = true\n[placement]\nlayers = [2, 2]"
USUAL = "forward = 1\nbackward_input = 1\nbackward_weight = 1\n"


@pytest.mark.parametrize(
    "make",
    [
        layers_moved,
        floating_layer,
        lambda: by_hand(HEALTHY),
        lambda: by_hand(BROKEN),
        lambda: schedule_for(
            grid(2, 2, 4, times=f"{USUAL}all_reduce = 2\n", more=OVERLAPPED), ["1.1"]
        ),
        lambda: schedule_for(grid(2, 2, 8, times=f"{USUAL}slow = {{'0.1' = 3}}\n")),
        lambda: schedule_for(grid(2, 2, 4, more='[placement]\norder = "bidirectional"'), ["1.1"]),
        lambda: schedule_for(grid(2, 2, 4, more='[placement]\norder = "v"\nchunks = 2')),
    ],
)
def test_of_every_kind_of_plan(make):
    schedule = make()
    assert not check(schedule)
    require_programs(schedule)


def test_a_reduction_beside_compute_begins_before_other_layers_are_computed():
    schedule = schedule_for(
        grid(
            1,
            1,
            3,
            times="forward = 4\nbackward_input = 4\nbackward_weight = 4\nall_reduce = 2",
            more="[network]\noverlap = true\n[placement]\nlayers = [4]",
        )
    )
    program = build_program(schedule, Worker(0, 0))
    assert (
        "".join(op.kind for op in program.ops).endswith("WWWAWWAWWAWWAO")
        and program.computes_after_reducing
    )


def test_lines_read_like_those_of_torch():
    program = build_program(schedule_for(grid(1, 2, 1)), Worker(0, 1))
    assert [*map(str, program.instructions)] == [
        "1RECV_F0.0 from 0.0 #0",
        "1F0.0",
        "1I0.0",
        "1SEND_B0.0 to 0.0 #1",
        "1W0.0",
        "1A",
        "O",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "F",
        "0F",
        "0F1",
        "0X0.1",
        "A",
        "1A0.1",
        "0O",
        "0RECV_F0.1",
        "0F0.1 to 0.1 #3",
        "0SEND_F0.1 to 0.1",
        "0F0.1 ",
        "-1F0.1",
        "0F0.1\n",
        "1" * 5000 + "F1.2",
        "0SEND_F0.1 to 0.1 #" + "1" * 5000,
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ProgramError, match="is no instruction; expected one such as"):
        Instruction.parse(text)
