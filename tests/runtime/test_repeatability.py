"""What depends on the worker or on the time.

It is found before a run begins, or does no harm.
"""

import threading

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from slipstream.runtime.config import ConfigError
from slipstream.runtime.coordinator.run_fit import check_fit
from slipstream.runtime.coordinator.run_options import RunOptions
from slipstream.runtime.data.data import batch_form, load_data
from slipstream.runtime.data.sample_digests import check_first_samples, digest_sample
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.seeds import GENERATOR_LOCK
from slipstream.runtime.state.held_layers import build_on_device
from tests.jobs import grid
from tests.runtime.careless import Seeded
from tests.runtime.running import schedule_for, tiny

ON = schedule_for(grid(2, 2, 2))
CPU = torch.device("cpu")


def reading(name: str, **options: object):
    return tiny(data=f"tests.runtime.careless:{name}", options=options)


def modelled(name: str):
    return replace(tiny(), model=replace(tiny().model, name=name))


@pytest.mark.parametrize("name", ["Drawn", "DrawnInOrder"])
def test_data_from_the_global_generator_are_refused(name):
    with pytest.raises(
        ConfigError,
        match=r"^training\.data is 'tests\.runtime\.careless:Drawn\w*': micro-batch 0 of "
        r"pipeline 0 in iteration 0 is another one when it is read again",
    ):
        check_fit(ON, reading(name), RunOptions())


def test_data_that_repeat_are_accepted():
    assert check_fit(ON, reading("Seeded"), RunOptions()).facts.identity.data[
        "samples of iteration 0"
    ]


def test_a_run_reads_its_first_micro_batches_once_and_two_of_them_again(monkeypatch):
    """Own data may take long for each."""
    read = []
    batch = Seeded.batch

    def counted(data, name, *more):
        read.append(name)
        return batch(data, name, *more)

    monkeypatch.setattr(Seeded, "batch", counted)
    check_fit(ON, reading("Seeded"), RunOptions())
    names = [Microbatch(0, pipeline, index) for pipeline in range(2) for index in range(2)]
    of_forms = 2 * [names[0]]  # of the values between layers, and of the micro-batches
    assert read == [*of_forms, *names, names[0], names[-1]]


def test_memory_that_the_next_call_overwrites_does_no_harm():
    buffered, seeded = load_data(reading("Buffered")), load_data(reading("Seeded"))
    names = [Microbatch(0, 0, index) for index in range(3)]
    kept = [buffered.batch(name, 1, 16) for name in names]  # in flight, all of them
    digests = [digest_sample(seeded.batch(name, 1, 16)) for name in names]
    assert [digest_sample(sample) for sample in kept] == digests


def test_a_model_whose_layers_are_not_seeded_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"^model\.name is 'tests\.runtime\.careless:Unseeded': layer 1 has other "
        r"initial parameters when it is built again",
    ):
        check_fit(ON, modelled("tests.runtime.careless:Unseeded"), RunOptions())


def test_a_model_that_repeats_is_accepted():
    assert check_fit(ON, modelled("tests.runtime.ruled_model:Model"), RunOptions()).facts.elements


def test_checks_leave_the_generator_as_it_was():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    check_fit(ON, modelled("tests.runtime.ruled_model:Model"), RunOptions())
    assert torch.equal(torch.get_rng_state(), before)


def test_first_samples_on_another_grid_are_equal_if_they_are_numbered():
    """And are others if pipeline and index name them."""

    def digest(config, count):
        counts = [count] * (4 // count)
        return check_first_samples(load_data(config), config, counts, 0, batch_form(config)).digests

    numbered = [digest(reading("Numbered", per_pipeline=count), count) for count in (1, 2, 4)]
    assert numbered[0] == numbered[1] == numbered[2]
    by_grid = [digest(reading("Seeded"), count) for count in (2, 4)]
    assert by_grid[0] != by_grid[1]


@pytest.mark.parametrize("filled", [True, False])
def test_layers_that_are_built_beside_training_change_no_random_number_of_it(filled):
    """A user's `build` may seed the global generator, as a layer's forward draws from it."""

    owned = []

    class Seeding:
        layers, device = 1, CPU

        def build(self, layer: int) -> nn.Module:
            owned.append(GENERATOR_LOCK.is_owned)
            torch.manual_seed(layer)
            return nn.Linear(2, 2)

    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    thread = threading.Thread(
        target=build_on_device, args=(Seeding(), 0), kwargs={"filled": filled}
    )
    thread.start()
    thread.join()
    assert owned == [True] and torch.equal(torch.rand(3), expected)


def test_models_of_this_package_are_not_built_for_a_check(monkeypatch):
    """It takes long, and they repeat."""
    model = build_model(tiny().model, 0, torch.float64, CPU)
    monkeypatch.setattr(type(model), "build", None)
    from slipstream.runtime.computing.trial import require_repeatable_layers

    require_repeatable_layers(model, tiny(), [10] * model.layers)
