"""Memory that a worker has freed goes back to the system."""

import os
import sys
import threading

import pytest
import torch

from benchmarks.resources import private_kib
from runtime.worker.freed_memory import give_back

KIB = 20_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc, and glibc keeps what is freed")
def test_what_a_thread_has_freed_goes_back_though_something_younger_lives():
    kept = []

    def work():
        held = [torch.ones(16 * 256) for _ in range(KIB // 16)]  # 16 KiB each: too small for pages of their own
        kept.append(torch.ones(16 * 256))
        held.clear()

    before = private_kib(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    freed = private_kib(os.getpid()) - before
    give_back()
    left = private_kib(os.getpid()) - before
    assert freed > 0.9 * KIB and left < 0.2 * KIB
