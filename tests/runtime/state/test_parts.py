"""Parts of layers' optimizer states.

Tested is how they are cut, who keeps them, and that they step as the whole does.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from slipstream.runtime.config import ParameterGroup, TrainingConfig
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.part_optimizer import PartOptimizer
from slipstream.runtime.state.part_state import (
    as_whole_part,
    assemble_state,
    count_elements,
    mark_uncut,
    pack_parts,
    select_span,
    unpack_parts,
)
from slipstream.runtime.state.parts import build_partition, split_by_layer, subtract
from slipstream.schedules.schedule import Worker

LAYERS = (3, 5)


def workers(count):
    return [Worker(pipeline, 0) for pipeline in range(count)]


@pytest.mark.parametrize(("total", "count"), [(10, 3), (12, 4), (7, 2), (3, 5), (1, 2)])
def test_each_element_is_one_workers_own_and_a_buddys_copy(total, count):
    cut = build_partition(total, workers(count), (), sharded=True)
    parts = [span for worker in cut.members for span in cut.own_parts(worker)]
    assert parts[0][0] == 0 and parts[-1][1] == total
    assert all(before[1] == after[0] for before, after in itertools.pairwise(parts))
    assert cut.padded_length % count == 0 and cut.padded_length >= total
    for element in range(total):
        assert (
            sum(
                first <= element < end
                for worker in cut.members
                for first, end in cut.stored_parts(worker)
            )
            == 2
        )


def test_where_state_is_not_sharded_each_keeps_all_and_the_first_speaks_for_it():
    cut = build_partition(10, workers(3), (), sharded=False)
    assert [cut.stored_parts(worker) for worker in cut.members] == [((0, 10),)] * 3
    assert [cut.own_parts(worker) for worker in cut.members] == [
        ((0, 10),),
        (),
        (),
    ] and cut.padded_length == 10


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1), (3, 2, 1), (2, 2, 2), (1, 2, 1)])
def test_buddies_are_in_different_failure_domains(sizes):
    members = workers(sum(sizes))
    order = iter(members[::2] + members[1::2])
    domains = []
    for size in sizes:
        domains.append([next(order) for _ in range(size)])
    cut = build_partition(100, members, domains, sharded=True)
    for domain in domains:
        kept = {
            span for worker in members if worker not in domain for span in cut.stored_parts(worker)
        }
        assert kept == set(cut.spans), "all is left when a machine is lost"


def test_most_buddies_are_apart_where_one_machine_has_most_workers():
    members = workers(5)
    cut = build_partition(100, members, [members[:4], members[4:]], sharded=True)
    far = [place for place in cut.owners if (cut.buddies[place] == 4) != (place == 4)]
    assert len(far) == 2


def test_spans():
    assert (
        subtract((0, 10), [(5, 20), (2, 3)]) == ((0, 2), (3, 5))
        and subtract((3, 4), [(0, 10)]) == ()
    )
    assert subtract((5, 8), [(0, 2), (9, 10)]) == ((5, 8),)
    assert dict(split_by_layer((3, 11), (2, 5), {2: 4, 3: 0, 4: 9}.__getitem__)) == {
        2: (3, 4),
        4: (0, 7),
    }


def config(**training):
    return TrainingConfig(learning_rate=0.1, shard_optimizer=True, **training)


CONFIGS = {
    "adamw": config(),
    "momentum of some": config(
        optimizer="sgd", parameter_groups=(ParameterGroup(parameters="*.weight", momentum=0.9),)
    ),
    "masters": config(dtype="bf16", master_weights=True),
    "masters, bf16 sums": config(dtype="bf16", master_weights=True, reduce_dtype="bf16"),
}


class Team:
    """Workers that hold two layers together, beside one that keeps all.

    Gradients are given.
    """

    def __init__(self, training: TrainingConfig, count: int, *, mixed: bool = False) -> None:
        self.training = training
        self.mixed = mixed
        self.dtype = torch.bfloat16 if training.master_weights else torch.float64
        self.whole = HeldLayers(self.modules(), training)
        self.total = sum(count_elements(module).cut for module in self.whole.modules.values())
        self.holdings = {worker: HeldLayers(self.modules(), training) for worker in workers(count)}
        self.cut_over(workers(count), [], -1)

    def modules(self):
        torch.manual_seed(0)
        linear, norm = partial(nn.Linear, 3, 5), partial(nn.LayerNorm, 5)
        if not self.mixed:
            return {
                layer: nn.Sequential(linear(dtype=self.dtype), norm(dtype=self.dtype))
                for layer in range(*LAYERS)
            }
        found = {
            layer: nn.Sequential(norm(dtype=torch.float32), linear(dtype=self.dtype))
            for layer in range(*LAYERS)
        }
        for module in found.values():
            mark_uncut(module, ["0.weight", "0.bias"])
        return found

    def cut_over(self, members, parts, after):
        self.keep(build_partition(self.total, members, (), sharded=True), parts, after)

    def keep(self, cut, parts, after):
        self.cut, members = cut, cut.members
        self.holdings = {
            worker: self.holdings.get(worker) or HeldLayers({}, self.training) for worker in members
        }
        for worker, holding in self.holdings.items():
            holding.hold_layers(
                holding.modules or self.modules(),
                {LAYERS: self.cut},
                worker,
                parts,
                after,
                range(*LAYERS) if after == -1 else (),
            )

    def run(self, iteration, factor=1.0):
        for holding in (self.whole, *self.holdings.values()):
            for gradient in holding.flat_gradients():
                draw = torch.Generator().manual_seed(iteration)
                size = (
                    len(gradient) if self.mixed and gradient.dtype == torch.float32 else self.total
                )
                gradient[:size].copy_(torch.randn(size, generator=draw, dtype=torch.float64))
            for span, sums in holding.copy_buffers(LAYERS).items() if holding.cuts else ():
                sums.copy_(holding.flat_gradients(LAYERS)[0][slice(*span)])
            holding.optimizer.step(iteration, factor)
        self.gather(iteration)

    def gather(self, iteration):
        flats = {
            worker: flat
            for worker, holding in self.holdings.items()
            for _, flat, _ in holding.flat_parameters()
        }
        for worker, flat in flats.items():
            for span in self.cut.own_parts(worker):
                for other in flats.values():
                    other[slice(*span)] = flat[slice(*span)]
        for holding in self.holdings.values():
            holding.optimizer.mark_gathered(iteration)

    def parts(self):
        copies = []
        for holding in self.holdings.values():
            for part in holding.optimizer.stored_states():
                tensors = {key: tensor.clone() for key, tensor in part.tensors.items()}
                copies.append(part._replace(tensors=tensors))
        return copies

    def require_equal(self):
        for holding in self.holdings.values():
            for name, parameter in holding.parameters_by_name().items():
                torch.testing.assert_close(
                    parameter, self.whole.parameters_by_name()[name], rtol=0, atol=1e-12
                )


@pytest.mark.parametrize(
    ("training", "mixed"),
    [*((config, False) for config in CONFIGS.values()), (CONFIGS["adamw"], True)],
    ids=[*CONFIGS, "norms in another dtype"],
)
def test_parts_step_undo_and_move_as_the_whole_does(training, mixed):
    team = Team(training, 3, mixed=mixed)
    for iteration in range(3):
        team.run(iteration, 0.5)
        team.require_equal()
        squares = [holding.optimizer.layer_squares() for holding in team.holdings.values()]
        for layer, square in team.whole.optimizer.layer_squares().items():
            assert sum(mine[layer] for mine in squares) == pytest.approx(square, rel=1e-12)
    team.run(3)
    for holding in (team.whole, *team.holdings.values()):
        holding.optimizer.return_to(2)
    assert all(holding.optimizer.whole_after is None for holding in team.holdings.values())
    del team.holdings[Worker(1, 0)]
    parts = team.parts()
    # One is lost, two come.
    team.cut_over([Worker(0, 0), Worker(2, 0), Worker(3, 0), Worker(4, 0)], parts, 2)
    team.require_equal()
    for iteration in range(3, 6):
        team.run(iteration)
        team.require_equal()


@pytest.mark.parametrize("training", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("committed", [2, 3])
def test_who_is_left_steps_on_with_what_it_keeps(training, committed):
    """In the same memory. Parameters alone come from others where a step was undone."""
    team = Team(training, 3)
    for iteration in range(4):
        team.run(iteration, 0.5)
    for holding in (team.whole, *team.holdings.values()):
        holding.optimizer.return_to(committed)
    del team.holdings[Worker(1, 0)]
    parameters = [part._replace(state=False) for part in team.parts()]

    def places():
        flats = [
            flat for holding in team.holdings.values() for _, flat, _ in holding.flat_parameters()
        ]
        gradients = [
            gradient for holding in team.holdings.values() for gradient in holding.flat_gradients()
        ]
        return [tensor.data_ptr() for tensor in (*flats, *gradients)]

    before = places()
    team.keep(
        team.cut.after_losses([Worker(0, 0), Worker(2, 0)]),
        parameters if committed == 2 else [],
        committed,
    )
    assert places() == before
    team.require_equal()
    for iteration in range(committed + 1, 6):
        for holding in (team.whole, *team.holdings.values()):
            holding.zero_gradients()
        team.run(iteration)
        team.require_equal()


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("training", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_step_is_undone_where_the_sums_for_copies_have_not_come(training, steps_before):
    """Their owner has died."""
    team = Team(training, 3)
    for iteration in range(steps_before):
        team.run(iteration)
    before, holding = team.parts(), team.holdings[Worker(0, 0)]
    for gradient in holding.flat_gradients():
        gradient.fill_(1.0)
    holding.optimizer.step(steps_before)
    holding.optimizer.return_to(steps_before - 1)
    after = team.parts()
    for part, other in zip(before, after, strict=True):
        assert part[:3] == other[:3] and part.tensors.keys() == other.tensors.keys()
        assert all(
            torch.equal(tensor, other.tensors[name]) for name, tensor in part.tensors.items()
        )


@pytest.mark.parametrize("training", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("committed", [2, 3])
def test_copies_are_as_their_owners_parts_whenever_all_stop(training, committed):
    # They are so bit for bit, and so are the parameters: the step of 3 was made twice, as where a
    # guess was wrong, and one of 4 was not made at all.
    team = Team(training, 3)
    for iteration in range(3):
        team.run(iteration, 0.5)
    team.run(3)
    for holding in team.holdings.values():
        holding.optimizer.undo()
        holding.optimizer.step(3, 0.25)
    for holding in team.holdings.values():
        holding.optimizer.return_to(committed)
    owners = {
        part[:3]: part
        for holding in team.holdings.values()
        for layer in range(*LAYERS)
        for part in holding.optimizer.own_states(layer)
    }
    for worker, holding in team.holdings.items():
        owned = [part for layer in range(*LAYERS) for part in holding.optimizer.own_states(layer)]
        places = {part[:3] for part in owned}
        copied = [part for part in holding.optimizer.stored_states() if part[:3] not in places]
        assert copied, worker
        for part in copied:
            its = owners[part[:3]]
            assert part.tensors.keys() == its.tensors.keys()
            assert all(
                torch.equal(tensor, its.tensors[name]) for name, tensor in part.tensors.items()
            )
        ((_, flat, _),) = holding.flat_parameters()
        theirs = {
            other: flat
            for other, holding in team.holdings.items()
            for _, flat, _ in holding.flat_parameters()
        }
        for span in team.cut.copied_parts(worker):
            owner = next(other for other in team.cut.members if span in team.cut.own_parts(other))
            assert torch.equal(flat[slice(*span)], theirs[owner][slice(*span)])


@pytest.mark.parametrize("gone", [(), (1,), (0, 2), (1, 2), (3, 4), (0, 2, 4)])
def test_buddies_step_the_parts_of_those_that_are_gone(gone):
    """Of five, each is the next one's buddy."""
    cut, members = build_partition(23, workers(5), (), sharded=True), workers(5)
    survivors = [worker for worker in members if worker.pipeline not in gone]
    then = cut.after_losses(survivors)
    if gone in {(1, 2), (3, 4), (0, 2, 4)}:
        assert then is None, "4 and 0 are buddies, too"
        return
    assert then is not None and then.spans == cut.spans and then.padded_length == cut.padded_length
    for worker in survivors:
        assert set(then.stored_parts(worker)) == set(cut.stored_parts(worker)), "nothing moves"
        assert {*cut.own_parts(worker)} <= {*then.own_parts(worker)} and {
            *then.copied_parts(worker)
        } <= {*cut.copied_parts(worker)}
    assert sorted(span for worker in survivors for span in then.own_parts(worker)) == sorted(
        cut.spans
    )
    assert sum(len(then.copied_parts(worker)) for worker in survivors) == 5 - 2 * len(gone)
    assert build_partition(23, members, (), sharded=False).after_losses(survivors) is None


@pytest.mark.parametrize("training", CONFIGS.values(), ids=CONFIGS.keys())
def test_the_whole_state_comes_from_own_parts_and_goes_anywhere(training):
    team = Team(training, 3)
    team.run(0)
    team.run(1)
    module = team.whole.modules[3]
    parts = [part for holding in team.holdings.values() for part in holding.optimizer.own_states(3)]
    state = assemble_state(module, unpack_parts(pack_parts(parts)))
    for unfit in (parts[0]._replace(state=False), parts[0]._replace(after=None)):
        with pytest.raises(AssertionError):  # what `unpack_parts` could not tell
            pack_parts([unfit])
    theirs = assemble_state(module, team.whole.optimizer.own_states(3))
    assert state.keys() == theirs.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-12)
    dtypes = {tensor.dtype for name, tensor in state.items() if name.startswith("model.")}
    assert dtypes == {torch.float32 if training.master_weights else torch.float64}
    some = select_span(module, as_whole_part(module, 3, state), (2, 17), state=False)
    assert {name: len(tensor) for name, tensor in some.items()} == {
        "model.0.weight": 13,
        "model.0.bias": 2,
    }


@pytest.mark.parametrize(
    ("training", "own_numbers", "copy"),
    [
        (config(dtype="bf16", master_weights=True), 24, 20),
        (config(dtype="float32"), 20, 20),
        (config(dtype="bf16", master_weights=True, reduce_dtype="bf16"), 24, 16),
    ],
)
@pytest.mark.parametrize("holders", [2, 3, 4, 8])
def test_memory_is_that_of_two_parts(training, own_numbers, copy, holders):
    """Masters, two moments and the way back: 24 bytes; without masters, parameters themselves are
    stepped. A copy has no way back, but what it steps is never the parameter itself, and there are
    two buffers for gradients.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if training.master_weights else torch.float32
    module = nn.Sequential(nn.Linear(64, 64, dtype=dtype), nn.LayerNorm(64, dtype=dtype))
    cut = build_partition(count_elements(module).cut, workers(holders), (), sharded=True)
    for worker in cut.members:
        holding = HeldLayers({0: module}, training)
        holding.hold_layers(holding.modules, {(0, 1): cut}, worker, [], -1)
        for iteration in range(2):
            holding.optimizer.step(iteration)
        assert isinstance(holding.optimizer, PartOptimizer)
        taken = holding.optimizer.state_bytes() + holding.optimizer.undo_bytes()
        assert taken == pytest.approx(
            (own_numbers + copy) * count_elements(module).total / holders, rel=0.02
        )
