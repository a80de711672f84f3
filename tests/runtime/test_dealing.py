"""Samples that are not alike, dealt to the names of schedules.

The numbers are those of one process all the same.
"""

import threading

import numpy as np
import pytest

from slipstream.cli.run_page import run_page
from slipstream.runtime.config import ConfigError
from slipstream.runtime.data.data import load_data
from slipstream.runtime.data.dealt_samples import DealtSamples, check_costs, digest_costs
from slipstream.runtime.data.loss_weights import LossWeights
from slipstream.runtime.data.token_data import BadSampleError
from slipstream.runtime.launch import run
from slipstream.runtime.placement import place_layers
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Slowdown
from slipstream.runtime.replay.group_cache import GenerationEndedError
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.run_record import read_run
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import at, dead, returned, train
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny
from tests.runtime.test_routes import LINEAR, eight_layers
from tests.runtime.test_settling import phases
from tests.runtime.test_settling import train as train_and_settle
from tests.runtime.uneven_data import Uneven

WIDE = grid(3, 2, 4, more="optimizer = 1")
DATA = "tests.runtime.uneven_data:Uneven"
IN_ORDER = "tests.runtime.uneven_data:UnevenInOrder"


def uneven(job=WIDE, **training):
    return tiny(
        **{
            "iterations": 6,
            "data": DATA,
            "loss_weights": "tokens",
            "deal_swaps": 200,
            "options": {"microbatches": list(job.microbatches)},
            **training,
        }
    )


def dealt_samples(schedule, config, data=None):
    return DealtSamples(
        schedule,
        schedule.grid,
        data or Uneven(config),
        config.training,
        place_layers(schedule.grid, 4),
    )


@pytest.mark.parametrize("failed", [[], ["1.0"]])
def test_an_iteration_has_its_samples_and_most_have_other_names(failed):
    schedule, config = schedule_for(WIDE, failed), uneven()
    dealt = dealt_samples(schedule, config)
    for iteration in (0, 1, 2, 7, 3):  # also where nobody has asked for it ahead
        names = [
            Microbatch(iteration, pipeline, index) for pipeline in range(3) for index in range(4)
        ]
        found = [dealt(name) for name in names]
        assert sorted(found) == names and found != names
        again = dealt_samples(schedule, config)
        assert [again(name) for name in names] == found
        again.close()
    dealt.close()


def test_what_is_read_in_order_is_dealt_as_well():
    config = uneven(data=IN_ORDER)
    data, plain = load_data(config, WIDE.microbatches), Uneven(config)
    dealt, expected = (
        dealt_samples(schedule_for(WIDE), config, data),
        dealt_samples(schedule_for(WIDE), config),
    )
    for iteration in (0, 1, 2, 7, 3):
        names = plain._names(iteration)
        samples = [expected(name) for name in names]
        assert [dealt(name) for name in names] == samples != names
        assert (
            data.tokens(iteration)
            == plain.tokens(iteration)
            == [count for (count,) in data.lengths(iteration)]
        )
    dealt.close()
    expected.close()


def test_data_that_are_read_in_order_and_give_another_number_of_samples_are_refused():
    data = load_data(uneven(data=IN_ORDER), (4, 4, 4, 4))
    with pytest.raises(
        BadSampleError, match="the data give 12 samples for iteration 3; expected 16, one for each"
    ):
        data.batch(Microbatch(3, 0, 0), 1, 16)


def test_an_iteration_that_is_being_dealt_is_not_waited_for_once_the_order_has_ended():
    """That takes long where each process compiles first: nobody could pause after a death."""
    config, schedule, goes_on = uneven(), schedule_for(WIDE), threading.Event()

    class Slow(Uneven):
        def costs(self, iteration):
            goes_on.wait()
            return super().costs(iteration)

    def over():
        raise GenerationEndedError("the order is over")

    dealt = DealtSamples(
        schedule,
        schedule.grid,
        Slow(config),
        config.training,
        place_layers(schedule.grid, 4),
        require=over,
    )
    try:
        with pytest.raises(GenerationEndedError):
            dealt(Microbatch(0, 0, 0))
    finally:
        goes_on.set()
        dealt.close()


def test_without_costs_or_swaps_each_sample_has_its_own_name():
    config = uneven(deal_swaps=0)
    name = Microbatch(2, 1, 1)
    assert dealt_samples(schedule_for(WIDE), config)(name) == name


def test_weights_are_shares_of_an_iterations_tokens():
    config = uneven()
    data = Uneven(config)
    weights = LossWeights(data, config.training, (4, 4, 4))
    assert sum(weights(name) for name in data._names(3)) == pytest.approx(1)
    assert weights(Microbatch(3, 1, 2)) == pytest.approx(data.tokens(3)[6] / sum(data.tokens(3)))
    both = LossWeights(data, config.training, (4, 4, 4), rounds=2)
    assert sum(
        both(name) for iteration in (4, 5) for name in data._names(iteration)
    ) == pytest.approx(2)


@pytest.mark.parametrize(
    "training",
    [
        {},
        {"data": IN_ORDER, "shard_optimizer": True, "clip_norm": 0.5},
        {
            "evaluate_every": 2,
            "evaluation_iterations": 2,
            "validation_data": DATA,
            "deal_swaps": 1,
            "recompute": "full",
        },
    ],
)
def test_killed_and_back_with_the_same_numbers(training, fork_server, tmp_path):
    result = train(
        [at("1.0", 1, 3), at("2.1", 3, "A"), at("0.1", 4, "stepped")],
        fork_server,
        tmp_path,
        job=WIDE,
        config=uneven(**training),
    )
    assert result.recoveries


@pytest.mark.parametrize(
    "training",
    [
        {},
        pytest.param({"shard_optimizer": True, "clip_norm": 0.5}, marks=pytest.mark.slow),
        pytest.param({"shard_optimizer": True, "tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
)
def test_one_that_dies_comes_back(training, fork_server, tmp_path):
    """Each schedule has its own permutation, also of whoever has come in."""
    result = train(
        [at("1.0", 2, 1)],
        fork_server,
        tmp_path,
        job=WIDE,
        config=uneven(iterations=50, **training),
        returns=(Return(Worker(1, 0), 3),),
    )
    assert dead(result) == ["1.0"] and returned(result) == ["1.0"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "training", [{}, {"tensor_parallel": 2}, {"tensor_parallel": 2, "shard_optimizer": True}]
)
def test_layers_move(training, fork_server, tmp_path):
    config = eight_layers(
        60,
        data=DATA,
        loss_weights="tokens",
        deal_swaps=200,
        clip_norm=1.6,
        evaluate_every=10,
        validation_data=DATA,
        options={"microbatches": list(LINEAR.microbatches)},
        **training,
    )
    result, events, _ = train_and_settle([at("1.2", 2, "O")], fork_server, tmp_path, config=config)
    assert dead(result) == ["1.2"] and phases(events) == ["whole", "at once", "settled"]


def test_slow_workers_whose_work_is_shed(fork_server, tmp_path):
    job = grid(3, 2, 4, more='optimizer = 1\nslow = {"1.0" = 2.0}')
    train(
        [],
        fork_server,
        tmp_path,
        job=job,
        config=uneven(),
        slowdowns=(Slowdown(Worker(1, 0), 0, 2.0),),
    )


@pytest.mark.parametrize("failed", [[], ["1.0"]])
def test_several_ranks(failed, fork_server, tmp_path):
    config = uneven(tensor_parallel=2)
    result = run(schedule_for(WIDE, failed), config, out=tmp_path, fork_server=fork_server)
    assert_same_numbers(result, judge(uneven(), WIDE.microbatches, 6))


def test_tokens_weigh_otherwise_than_micro_batches():
    by_tokens, alike = (
        judge(uneven(loss_weights=how), WIDE.microbatches, 2) for how in ("tokens", "microbatches")
    )
    assert by_tokens.losses[0] != pytest.approx(alike.losses[0], rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "negative",
            "the data's costs of iteration 0: the F of sample 0 costs -1 times the mean; "
            "expected 0 to 1000",
        ),
        (
            "fewer",
            r"the data's costs of iteration 0: costs are of shape \[1, 3\]; expected \[12, 3\]",
        ),
    ],
)
def test_costs_that_cannot_be_are_refused_before_anything_runs(
    wrong, message, fork_server, tmp_path
):
    config = uneven(options={"microbatches": [4, 4, 4], "wrong": wrong})
    with pytest.raises(ConfigError, match=message):
        run(schedule_for(WIDE), config, out=tmp_path / "out", fork_server=fork_server)
    assert fork_server.pids == {}


def test_data_that_do_not_tell_tokens_cannot_be_weighed_by_them(fork_server, tmp_path):
    with pytest.raises(
        ConfigError, match=r"training\.loss_weights is 'tokens', and the data have no method tokens"
    ):
        run(
            schedule_for(WIDE),
            tiny(loss_weights="tokens"),
            out=tmp_path / "out",
            fork_server=fork_server,
        )


@pytest.fixture
def documents(tmp_path):
    """Tokens of documents of 1 to 30 tokens; a context of 16."""
    random = np.random.default_rng(3)
    tokens = random.integers(1, 256, 4000)
    tokens[np.cumsum(random.integers(1, 30, 200))] = 0
    tokens.astype("<u2").tofile(tmp_path / "tokens.bin")
    rows = [[1e-3, 0.0, 1e-4]] * 4
    return {
        "data": None,
        "options": {},
        "tokens": str(tmp_path / "tokens.bin"),
        "document_end": 0,
        "length_costs": dict.fromkeys(("forward", "backward_input", "backward_weight"), rows),
    }


@pytest.mark.parametrize("training", [{}, {"tensor_parallel": 2, "clip_norm": 0.5}])
def test_packed_documents_are_dealt_by_their_lengths(documents, training, fork_server, tmp_path):
    config = uneven(**documents, **training)
    schedule = schedule_for(WIDE)
    data = load_data(config, WIDE.microbatches)
    dealt = DealtSamples(
        schedule, schedule.grid, data, config.training, place_layers(schedule.grid, 4)
    )
    names = [Microbatch(1, pipeline, index) for pipeline in range(3) for index in range(4)]
    assert sorted(map(dealt, names)) == names != list(map(dealt, names))
    dealt.close()
    result = train(
        [at("1.0", 1, 3), at("0.1", 4, "stepped")],
        fork_server,
        tmp_path / "run",
        job=WIDE,
        config=config,
    )
    assert result.recoveries
    record = read_run(tmp_path / "run")
    # these costs are none of this machine
    assert record.median_cost_error is not None and 0 < record.median_cost_error < 100
    page = run_page(record, tmp_path / "page.html").decode()
    assert "costs known to" in page and '<table id="ops">' in page and "measured / planned" in page


def test_costs_of_another_model_are_refused(documents):
    documents["length_costs"]["forward"] = documents["length_costs"]["forward"][1:]
    with pytest.raises(
        ConfigError,
        match=r"training\.length_costs is .*; expected a table with lists of equal length",
    ):
        uneven(**documents)
    short = {name: [[1.0, 0.0, 0.0]] for name in ("forward", "backward_input", "backward_weight")}
    config, schedule = uneven(**documents | {"length_costs": short}), schedule_for(WIDE)
    with pytest.raises(ConfigError, match="length_costs is of 1 layers; the model has 4"):
        check_costs(
            load_data(config, WIDE.microbatches),
            schedule,
            config.training,
            place_layers(schedule.grid, 4),
        )


def test_workers_that_would_deal_otherwise_are_told_apart():
    config = uneven()
    others = (
        {"deal_swaps": 100},
        {"seed": 5},
        {"options": {"microbatches": [4, 4, 4], "wrong": "negative"}},
    )
    configs = [config, *(uneven(**more) for more in others)]
    digests = {digest_costs(Uneven(config_), config_.training) for config_ in configs}
    assert len(digests) == 4 and digest_costs(Uneven(config), config.training) in digests
