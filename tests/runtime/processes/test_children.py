import pytest

from runtime.processes.children import ChildError, Children
from tests.runtime.processes.child import Life


def start(*lives: Life) -> Children:
    return Children("tests.runtime.processes.child", lives)


def test_answers_come_in_the_order_of_tasks():
    with start(Life(0.2), Life(0.0)) as children:
        assert children.answers(60) == [b"done", b"done"]


def test_the_one_that_failed_is_named_not_those_that_are_ended_for_it():
    children = start(Life(300), Life(0.0, "first\nno room", 1), Life(300))
    with children, pytest.raises(ChildError, match=r"^no room$"):
        children.answers(60)
    assert all(process.returncode for process, _ in children.processes)


def test_one_that_says_nothing_is_named_by_its_status():
    with start(Life(0.0, "", 3)) as children, pytest.raises(ChildError, match=r"^a process ended with status 3$"):
        children.answers(60)


def test_waiting_has_an_end():
    with start(Life(300)) as children, pytest.raises(TimeoutError):
        children.answers(0.5)
    assert children.processes[0][0].returncode is not None
