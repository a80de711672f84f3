"""The excerpt that a violation is shown with."""

from slipstream.schedules.check import check
from slipstream.schedules.schedule import Op, OpKind, Worker
from slipstream.schedules.text_excerpt import render_excerpt
from tests.generate import HEALTHY, by_hand


def test_it_marks_the_op():
    schedule = by_hand({**HEALTHY, "0.0": HEALTHY["0.0"].replace("W0@4", "W0@5")})
    violation = next(
        violation for violation in check(schedule) if violation.rule == "one-at-a-time"
    )
    lines = render_excerpt(schedule, violation.op).splitlines()
    assert lines[1].startswith(">   0.0 |F0---F1---     I0---     I1---W1---A----O----")
    assert lines[2].index("^^^^^") == lines[1].index("I1---")
    assert "1.0" not in "".join(lines)


def test_absurd_times_do_not_make_it_long():
    schedule = by_hand(HEALTHY)
    far = Op(OpKind.F, 0, 0, 0, Worker(0, 0), 2**52, 2**53)
    assert len(render_excerpt(schedule, far)) < 2000
    assert render_excerpt(schedule, None, Worker(7, 7)) == ""
