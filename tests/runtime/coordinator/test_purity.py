"""Decisions are functions of the state and the event: what they import computes no model."""

import subprocess
import sys


def test_decisions_run_without_torch():
    code = (
        "import sys\nimport slipstream.runtime.coordinator.decisions.transition\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', "
        "'transformers')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
