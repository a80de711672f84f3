"""Random generators of the process: one thread at a time, unless it is left behind."""

import threading

import torch

from slipstream.runtime.seeds import GENERATOR_LOCK, seeded


def test_a_thread_that_is_left_behind_keeps_nobody_waiting_and_leaves_without_a_change():
    inside, out, drawn = threading.Event(), threading.Event(), []

    def stuck():
        with seeded(1), seeded(2):
            inside.set()
            out.wait(20)

    def next_one():
        with seeded(3):
            drawn.append(torch.rand(1))
            out.set()
            thread.join(20)
            drawn.append(torch.rand(1))

    thread, waiting = threading.Thread(target=stuck), threading.Thread(target=next_one)
    thread.start()
    inside.wait(20)
    waiting.start()
    waiting.join(0.1)
    assert not drawn, "the generators are taken"
    GENERATOR_LOCK.release_from(waiting.ident)  # it has nothing yet
    GENERATOR_LOCK.release_from(thread.ident)
    waiting.join(20)
    with seeded(3):
        assert torch.equal(torch.cat(drawn), torch.cat([torch.rand(1), torch.rand(1)]))
    assert not GENERATOR_LOCK.is_owned
