"""Make a process train over the scripted double of NCCL (`benchmarks.chaos --double`)."""

import tests.runtime.over_double  # noqa: F401  # sessions of this process use it
from slipstream.runtime.coordinator import run_fit

run_fit.choose_transport = lambda *_, **__: "nccl"  # type: ignore[assignment]
