"""Memory that a worker has freed goes back to the system."""

import multiprocessing
import os
import sys
import threading
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from benchmarks.resources import private_kib
from slipstream.runtime.worker.device_memory import trim_host_memory
from tests.patience import SECONDS

KIB = 20_000


def freed_and_left() -> tuple[int, int]:
    """KiB that a thread has freed and the process still has.

    The two values are before and after `trim_host_memory`.
    """
    kept = []

    def work():
        # 16 KiB each: too small for pages of their own.
        blocks = [torch.ones(16 * 256) for _ in range(KIB // 16)]
        kept.append(torch.ones(16 * 256))
        blocks.clear()

    before = private_kib(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    freed = private_kib(os.getpid()) - before
    trim_host_memory()
    return freed, private_kib(os.getpid()) - before


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc, and glibc keeps what is freed"
)
def test_what_a_thread_has_freed_goes_back_though_something_younger_lives():
    # A process whose heap holds nothing that older tests have freed.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        freed, left = fresh.submit(freed_and_left).result(timeout=SECONDS)
    assert freed > 0.9 * KIB and left < 0.2 * KIB
