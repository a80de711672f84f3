"""A device without room.

An iteration is tried once more, and a second time ends the run; nobody's death follows.
"""

import pytest

from slipstream.runtime.errors import RunError
from tests.runtime.failing import CONFIG, at, train
from tests.runtime.running import tiny


@pytest.mark.parametrize(
    "config", [CONFIG, tiny(shard_optimizer=True, iterations=6)], ids=["whole", "parts"]
)
def test_an_iteration_is_tried_once_more(config, fork_server, tmp_path):
    """Also a later one, by whomever; the numbers are those of one process."""
    result = train(
        [at("0.1", 2, 2, "memory"), at("1.0", 3, "O", "memory"), at("0.1", 5, 4, "memory")],
        fork_server,
        tmp_path,
        config=config,
    )
    assert [(recovery.dead, recovery.live) for recovery in result.recoveries] == [((), 4)] * 3


def test_a_second_time_ends_the_run_and_says_what_was_held(fork_server, tmp_path):
    with pytest.raises(
        RunError,
        match=r"worker 0\.1 ran out of memory in iteration 3 twice, while it held [\d.]+ MiB "
        r"of parameters, [\d.]+ MiB of gradients and [\d.]+ MiB .*\[memory\] capacity",
    ):
        train([at("0.1", 3, 2, "memory"), at("0.1", 3, 3, "memory")], fork_server, tmp_path)
