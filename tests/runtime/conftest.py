"""The tests share the machine with each other: one thread each."""

import pytest
import torch

from runtime.processes.fork_server import ForkServer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def fork_server():
    """Forks the workers of all runs, so that torch is imported once for all of them."""
    with ForkServer() as fork_server:
        yield fork_server
