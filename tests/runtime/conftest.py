"""The tests share the machine with each other: one thread each."""

import pytest
import torch

from runtime.processes.fork_server import Nursery

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def nursery():
    """Forks the workers of all runs, so that torch is imported once for all of them."""
    with Nursery() as nursery:
        yield nursery
