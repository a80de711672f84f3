"""A process that ends while a thread is inside torch ends as its program says."""

import subprocess
import sys

import pytest

from tests import patience

PROGRAM = """
import contextlib, os, sys, threading, time
from datetime import timedelta
from slipstream.runtime.replay import python_exit
from slipstream.runtime.replay.gloo import InterruptibleCalls
from slipstream.runtime.replay.torch_groups import HashStore
from slipstream.runtime.torch_pipelining.watch import Watch


class LongEnd:
    def __del__(self):
        time.sleep({end})


python_exit.EXIT_SECONDS = {limit}
long_end = LongEnd()
began, inside, left = threading.Event(), threading.Event(), threading.Event()


def wait():
    began.set()
    with contextlib.suppress(RuntimeError):
        HashStore().wait(["never"], timedelta(seconds={call}))


class WaitingEnd:
    def __del__(self):
        wait()

    def call(self):
        inside.set()
        left.wait()


def run(call):
    try:
        calls.run_call(call)
    except RuntimeError as error:
        print(error)


"""
"""A call of `wait` takes `call` seconds; the end of Python itself takes `end` seconds."""
LEAVE_A_CALL = """
calls = InterruptibleCalls()
thread = threading.Thread(target=run, args=(wait,))
thread.start()
began.wait()
calls.end_all(frozenset)
thread.join()
"""
LEAVE_A_DESTRUCTOR = """
calls = InterruptibleCalls()
thread = threading.Thread(target=run, args=(WaitingEnd().call,))
thread.start()
inside.wait()
calls.end_all(frozenset)
thread.join()
left.set()  # from here on, the thread of the call has the last reference
began.wait()
"""
LEAVE_A_WATCH = """
watch = Watch("127.0.0.1", wait)
began.wait()
"""
FORK = """
process = os.fork()
if not process:
    sys.exit(7)
os._exit(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""


def run(program, *, call, end, limit):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(call=call, end=end, limit=limit) + program],
        capture_output=True,
        text=True,
        timeout=patience.SECONDS,
        check=False,
    )


@pytest.mark.parametrize("program", [LEAVE_A_CALL, LEAVE_A_DESTRUCTOR, LEAVE_A_WATCH])
def test_a_call_that_returns_while_python_ends_does_not_abort_the_process(program):
    done = run(program, call=1, end=2, limit=30)
    assert (done.returncode, done.stderr) == (0, "")
    assert program is LEAVE_A_WATCH or "shut down" in done.stdout


def test_a_call_that_does_not_return_is_not_awaited_for_long():
    done = run(LEAVE_A_CALL, call=2 * patience.SECONDS, end=0, limit=0.1)
    assert done.returncode == 0, done.stderr


def test_a_forked_process_does_not_wait_for_calls_of_the_first():
    limit = 2 * patience.SECONDS
    done = run(LEAVE_A_CALL + FORK, call=limit, end=0, limit=limit)
    assert done.returncode == 7, done.stderr
