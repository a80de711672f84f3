"""Which parameters got a gradient in an iteration, and what is summed of that."""

import torch
from torch import nn

from slipstream.runtime.state.gradients import allocate_gradients, find_unused
from slipstream.runtime.state.parts import build_partition
from slipstream.schedules.schedule import Worker


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in (3, 2, 4)]


def test_zeros_that_are_added_count_and_what_another_worker_has_used_is_used() -> None:
    ours, theirs = parameters(), parameters()
    [mine], [other] = allocate_gradients(ours), allocate_gradients(theirs)
    (0 * ours[0].sum()).backward()
    theirs[1].sum().backward()
    for buffer in (mine, other):
        buffer.mark_touched()
    assert find_unused([mine]) == {ours[1], ours[2]} and find_unused([other]) == {
        theirs[0],
        theirs[2],
    }
    for left, right in zip(mine.sums, other.sums, strict=True):
        left.add_(right)
    assert find_unused([mine]) == {ours[2]}
    assert mine.values.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0]
    mine.set_to_zero()
    assert find_unused([mine]) == set(ours) and not mine.sums[0].any()


def test_a_gradient_that_replaces_the_one_in_the_buffer_is_copied_into_it() -> None:
    # It is that of a user's function that does not add in place, or of a backward with
    # create_graph.
    ours = parameters()
    [mine] = allocate_gradients(ours)
    ours[0].grad = ours[0].grad + 2
    ours[1].square().sum().backward(create_graph=True)
    ours[2].grad = None
    assert find_unused([mine]) == {ours[2]}
    assert mine.values.tolist() == [2, 2, 2, 2, 2, 0, 0, 0, 0]
    assert all(parameter.grad is view for parameter, view in zip(ours, mine.views, strict=True))


def test_parts_of_values_and_whole_marks_are_summed_where_state_is_sharded() -> None:
    cut = build_partition(9, [Worker(0, 0), Worker(1, 0)], (), sharded=True)
    [mine] = allocate_gradients(parameters(), None, cut)
    values, marks = mine.sums
    assert len(values) == cut.padded_length == 10 and len(marks) == 3
