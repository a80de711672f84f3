"""Processes that import this train over the scripted double of NCCL that tests use (`benchmarks.chaos --double`)."""

import tests.runtime.over_double  # noqa: F401  # sessions of this process use it
from slipstream.runtime import run_fit

run_fit.choose_transport = lambda *_, **__: "nccl"  # type: ignore[assignment]
