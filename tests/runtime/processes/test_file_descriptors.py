"""Limits of open files and connections."""

import resource

import pytest

from slipstream.runtime.config import ConfigError
from slipstream.runtime.placement import place_layers
from slipstream.runtime.processes.file_descriptors import (
    count_communicator_ends,
    count_node_0_descriptors,
    raise_descriptor_limit,
)
from tests.jobs import grid
from tests.runtime.running import schedule_for


def test_the_limit_is_raised_to_what_the_system_allows_and_compared(monkeypatch):
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    raise_descriptor_limit(count_node_0_descriptors(1024, 128))
    assert limits == [4096, 4096]
    with pytest.raises(
        ConfigError, match=r"may open 4096 .* needs 8960; allow more, with ulimit -Hn 8960"
    ):
        raise_descriptor_limit(count_node_0_descriptors(4096, 512))


def test_without_a_limit_as_many_as_are_needed_are_asked_for(monkeypatch):
    limits = [1024, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    raise_descriptor_limit(9000)
    assert limits == [9000, resource.RLIM_INFINITY]


def test_each_communicator_opens_a_connection_to_the_store_for_each_of_its_ends():
    # Two pipelines of three stages: four neighbours in two directions, with two ends each; three
    # pairs of peers. With two ranks a worker all is twice, and the ranks of each of six workers
    # meet.
    schedule = schedule_for(grid(2, 3, 4))
    placement = place_layers(schedule.grid, 3)
    assert count_communicator_ends(schedule, placement, 1) == 4 * 2 * 2 + 3 * 2
    assert count_communicator_ends(schedule, placement, 2) == 2 * (4 * 2 * 2 + 3 * 2) + 6 * 2
    assert count_node_0_descriptors(6, 1, 22) == count_node_0_descriptors(6, 1) + 44
