"""Our orders in NeMo Automodel, which has its own function around torch's reader."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.interop.running import run_ranks
from tests.interop.test_torch_pipelining import TIMEOUT_SECONDS, V_SHAPE, order_of
from tests.jobs import grid

FOLDER = Path(__file__).parents[2] / "out" / "neighbours" / "nemo-automodel"
"""Where `make neighbours` puts it, without what it depends on."""


@pytest.mark.slow
@pytest.mark.skipif(
    not FOLDER.is_dir() and importlib.util.find_spec("nemo_automodel") is None,
    reason="nemo-automodel is not installed: make neighbours",
)
def test_its_own_schedules_of_our_orders_have_the_gradients_of_one_process(tmp_path, monkeypatch):
    for name, job in (("linear", grid(1, 3, 4)), ("v", grid(1, 2, 4, more=V_SHAPE))):
        (tmp_path / f"{name}.csv").write_text(order_of(job)[0])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FOLDER), *sys.path])))
    run_ranks("tests.interop.nemo_ranks", 3, str(tmp_path), seconds=TIMEOUT_SECONDS)
