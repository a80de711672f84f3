"""Limits of open files and connections."""

import resource

import pytest

from slipstream.runtime.config import ConfigError
from slipstream.runtime.processes.file_descriptors import count_node_0_descriptors, raise_descriptor_limit


def test_the_limit_is_raised_to_what_the_system_allows_and_compared(monkeypatch):
    limits = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    raise_descriptor_limit(count_node_0_descriptors(1024, 128))
    assert limits == [4096, 4096]
    with pytest.raises(ConfigError, match=r"may open 4096 .* needs 8960; allow more, with ulimit -Hn 8960"):
        raise_descriptor_limit(count_node_0_descriptors(4096, 512))


def test_without_a_limit_as_many_as_are_needed_are_asked_for(monkeypatch):
    limits = [1024, resource.RLIM_INFINITY]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(None), new))
    raise_descriptor_limit(9000)
    assert limits == [9000, resource.RLIM_INFINITY]
