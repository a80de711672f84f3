"""What a stage holds, as the system sees it, is what is known of it."""

import os
import subprocess
import sys

import msgspec
import pytest

from benchmarks.stage_memory import MMAP_THRESHOLD
from benchmarks.stage_memory import __name__ as measuring
from slipstream.runtime.config import parse_run_config
from tests.patience import SECONDS

WIDTH = 128
BLOCKS = 4


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process holds is read from /proc")
def test_copies_that_undo_a_step_are_those_of_parameters_and_adams_two_moments():
    config = parse_run_config(
        {"width": WIDTH, "blocks": BLOCKS, "heads": 2, "context": 32}, {"batch": 1}
    )
    answer = subprocess.run(
        [sys.executable, "-m", measuring, "1", config.to_json()],
        check=True,
        capture_output=True,
        timeout=SECONDS,
        env={**os.environ, **MMAP_THRESHOLD},
    )
    measured = msgspec.json.decode(answer.stdout, type=dict[str, int])
    # float32; the vocabulary, biases and norms are beside these.
    matrices = 4 * 12 * WIDTH * WIDTH * BLOCKS // 2
    assert 3 * matrices < measured["undo copies"] < 1.2 * 3 * matrices
    assert measured["always"] > 5 * matrices  # parameters, gradients, and the copies
