"""What the coordinator decides, told by hand what workers report."""

import itertools
from collections import defaultdict

import pytest
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import checkpoint_rollback
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog, CommitLogError
from slipstream.runtime.coordinator.decisions.effects import GiveUpWorker, SendMessage
from slipstream.runtime.coordinator.decisions.empty_orders import MAX_ORDERS_OF_MEMBERS
from slipstream.runtime.coordinator.decisions.failover import RejoiningPhase
from slipstream.runtime.coordinator.decisions.layer_fetches import (
    FETCH_RETRY_SECONDS,
    FETCHES_PER_ORDER,
    MAX_FETCH_FAILURES,
)
from slipstream.runtime.coordinator.decisions.run_state import EndedPhase, RunRules, build_initial_state
from slipstream.runtime.coordinator.decisions.schedule_requests import ScheduleAnswer, ScheduleRequest
from slipstream.runtime.coordinator.decisions.settling import MoveCost
from slipstream.runtime.coordinator.decisions.transition import (
    MAX_RETRY_SECONDS,
    ReportsReceived,
    TimePassed,
    WorkerDisconnected,
    WorkerLost,
    apply_event,
)
from slipstream.runtime.errors import OtherRunError, RunError
from slipstream.runtime.events import Event, NodeLost, Noted, WentBack
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.model.run_identity import RunIdentity
from slipstream.runtime.protocol.to_coordinator import (
    Checksum,
    FetchFailed,
    FetchUpToDate,
    Finished,
    IterationReport,
    Leaving,
    Paused,
    Published,
    ReadableCheckpoints,
    Ready,
    RecoveryReport,
    SampleDigest,
    TrainingStarted,
)
from slipstream.runtime.protocol.to_worker import (
    Acknowledged,
    EndOrder,
    Fetch,
    Finish,
    Leave,
    Publish,
    ReportCheckpoints,
    Train,
)
from slipstream.schedules.codec import decode
from slipstream.schedules.schedule import COMPUTE_KINDS, NoScheduleError, Seat, Worker
from tests.jobs import grid
from tests.runtime.coordinator.driving import prepared
from tests.runtime.coordinator.holding import holding, move, partition
from tests.runtime.running import schedule_for

JOB = grid(2, 2, 2)
BACK = Worker(1, 1)
MEMBERS = [Worker(0, 0), Worker(0, 1), Worker(1, 0)]
WIDE = grid(3, 2, 2)
FIRST_FETCH = FETCHES_PER_ORDER + 1
"""Of the first order."""
WIDE_MEMBERS = [*MEMBERS, Worker(2, 0), Worker(2, 1)]


class Planner:
    """Answers at once, or when it is told to, and is busy with one question at a time."""

    def __init__(self, job) -> None:
        self.job = job
        self.slow = False
        self.asked: list[tuple[Worker, ...]] = []
        self.answers = {}

    def answer(self, down, error=None):
        self.asked = []
        self.answers[down] = error or prepared(schedule_for(self.job, list(map(str, down))))

    def found(self, question):
        """What follows a question: its answer, where there is one."""
        if question.held is not None or question.from_checkpoint:
            return [ScheduleAnswer(question, NoScheduleError())]
        if question.down not in self.answers and self.slow:
            self.asked += [] if self.asked else [question.down]
            return []
        if question.down not in self.answers:
            self.answer(question.down)
        return [ScheduleAnswer(question, self.answers[question.down])]


class Run:
    """A run in which 1.1 is down and the others train."""

    def __init__(self, job=JOB, domains=(), settles=None) -> None:
        self.planner, self.now = Planner(job), 100.0
        self.sent = defaultdict(list)
        self.back: list[int] = []
        self.events: list[Event] = []
        first = schedule_for(job, [str(BACK)])
        self.rules = RunRules(first=prepared(first), iterations=range(100), partition=partition([0, 2, 4]),
                              domains=FailureDomains(domains), settles=settles)
        self.state = build_initial_state(self.rules, CommitLog(), self.now)
        for worker in MEMBERS if job is JOB else WIDE_MEMBERS:
            self.ready(worker)
        assert self.state.order == 1

    def happens(self, *events):
        for event in events:
            self.state, effects = apply_event(self.rules, self.state, event, self.now)
            for effect in effects:
                match effect:
                    case SendMessage():
                        for worker in effect.workers:
                            self.sent[worker].append(effect.message)
                    case Event():
                        self.events.append(effect)
                        if isinstance(effect, WentBack):
                            self.back.append(self.state.log.next_iteration)
            for effect in effects:
                if isinstance(effect, ScheduleRequest):
                    self.happens(*self.planner.found(effect))

    @property
    def recoveries(self):
        return self.state.recovery.recoveries

    @property
    def log(self):
        return self.state.log

    def started(self, worker, order):
        """The recovery that this ends."""
        before = len(self.recoveries)
        self.happens(TrainingStarted(worker, order))
        return self.recoveries[-1] if len(self.recoveries) > before else None

    def last(self, kind, worker=MEMBERS[0]):
        return next((message for message in reversed(self.sent[worker]) if isinstance(message, kind)), None)

    def ready(self, worker):
        self.happens(ready(worker))

    def lost(self, worker, reason, since=1.0):
        was_member = worker in self.state.members
        self.happens(WorkerLost(worker, reason, since))
        return was_member

    def ran(self, iteration, workers=MEMBERS):
        """Whether each of them is told to stop."""
        for worker in workers:
            self.happens(IterationReport(worker, 1, iteration, 0.0, 1.0))
        return [self.last(Acknowledged, worker).stop for worker in workers]

    def paused(self, workers=MEMBERS):
        for worker in workers:
            held = (2 * worker.column, 2 * worker.column + 2)
            self.happens(Paused(worker, self.state.order, holding(held), None, None))

    def can_read(self, worker, *iterations):
        self.happens(ReadableCheckpoints(worker, iterations))

    def fetch_up_to_date(self, fetch):
        self.happens(FetchUpToDate(BACK, fetch))


@pytest.fixture
def run():
    return Run()


def ready(worker):
    return Ready(worker, (("127.0.0.1", 1 + 10 * worker.pipeline + worker.column),))


def test_one_that_comes_back_fetches_its_layers_and_is_taken_in_at_a_turn(run):
    run.ran(0)
    run.ready(BACK)
    told = run.last(Fetch)
    assert told == run.last(Fetch, BACK) and (told.number, told.order) == (FIRST_FETCH, 1)
    assert {move.target for move in told.moves} == {BACK}
    assert told.moves == (move(BACK, Worker(0, 1), 2), move(BACK, Worker(0, 1), 3))
    assert told.addresses == ((Worker(0, 1), (("127.0.0.1", 2),)),)
    assert run.ran(1) == [False] * 3
    run.fetch_up_to_date(FIRST_FETCH)
    assert run.ran(2) == [True] * 3 and run.last(EndOrder) is None
    run.paused()
    order = run.last(Train)
    assert order == run.last(Train, BACK)
    assert order.order == 2 and order.first_iteration == 3 and order.fetch == FIRST_FETCH and order.moves == ()


def test_all_stop_at_the_same_turn_whoever_has_reported_before_it_was_agreed_on(run):
    """A member that is ahead has begun the next iteration: all run that one, and stop before the one after it."""
    run.ran(0)
    run.ready(BACK)
    run.ran(1, MEMBERS[:1])
    run.fetch_up_to_date(FIRST_FETCH)
    assert run.ran(1, MEMBERS[1:]) == [False] * 2
    assert run.ran(2, MEMBERS[1:]) == [True] * 2 and run.ran(2, MEMBERS[:1]) == [True]
    run.paused()
    assert run.last(Train).first_iteration == 3


def test_one_that_could_not_fetch_its_layers_tries_again_later(run):
    run.ran(0)
    run.ready(BACK)
    run.happens(FetchFailed(BACK, FIRST_FETCH))
    assert run.last(Fetch).number == FIRST_FETCH + 1 and run.last(Fetch).moves == ()  # who has begun it, ends it
    run.fetch_up_to_date(FIRST_FETCH)  # told before it heard of that
    assert run.ran(1) == run.ran(2) == [False] * 3
    assert run.last(Fetch).number == FIRST_FETCH + 1, "too soon"
    run.now += FETCH_RETRY_SECONDS
    run.happens(TimePassed())
    assert run.last(Fetch).number == FIRST_FETCH + 2 and run.last(Fetch).moves


def test_one_that_never_can_fetch_its_layers_gets_them_while_all_wait(run):
    run.ran(0)
    run.ready(BACK)
    for _ in range(MAX_FETCH_FAILURES):
        run.happens(FetchFailed(BACK, run.last(Fetch).number))
        run.now += FETCH_RETRY_SECONDS
        run.happens(TimePassed())
    assert run.ran(1) == [True] * 3
    run.paused()
    order = run.last(Train)
    assert order.order == 2 and order.fetch == 0 and [move.target for move in order.moves] == [BACK, BACK]


def test_a_failure_goes_before_who_comes_back(run):
    """Nobody waits for its layers: it stays outside, and fetches anew."""
    run.ran(0)
    run.ready(BACK)
    run.lost(Worker(1, 0), "killed", 1.0)
    assert run.last(EndOrder) == EndOrder(1) and run.last(EndOrder, BACK) is None
    run.paused(MEMBERS[:2])
    order = run.last(Train)
    assert order.order == 2 and order.fetch == 0 and order.moves == ()
    assert [seat.worker for seat in decode(bytes(order.schedule)).seats] == MEMBERS[:2]
    run.happens(TimePassed())
    assert run.last(Fetch).number == 2 * FETCHES_PER_ORDER + 1 and run.last(Fetch).order == 2 and run.last(Fetch).moves


def test_one_that_begins_late_does_not_end_the_recovery_from_a_death_meanwhile(run):
    """That would be told before anybody goes on, and then once more, without a cause."""
    run.lost(Worker(1, 0), "killed")
    assert run.started(Worker(0, 1), 1) is None
    run.paused(MEMBERS[:2])
    assert run.started(Worker(0, 0), 2) is None
    assert run.started(Worker(0, 1), 2).reasons == ("killed",) and len(run.recoveries) == 1


def test_a_pause_lasts_until_the_last_member_begins(run):
    run.lost(Worker(1, 0), "killed", 1.0)
    run.paused(MEMBERS[:2])
    assert run.started(Worker(0, 0), 2) is None
    run.now += 5.0
    assert run.started(Worker(0, 1), 2).seconds >= 5.0


def test_between_orders_that_end_before_anybody_has_begun_pauses_grow(run):
    """A connection that is refused may be refused again, and leave something behind each time."""
    given = []
    for _ in range(2000):
        if len(given) < run.state.order:
            given.append(run.state.recovery.ordered_at)
            if run.state.order == MAX_ORDERS_OF_MEMBERS:
                break
            for worker in MEMBERS:
                run.happens(Paused(worker, run.state.order, holding((0, 4)), None, "refused"))
        run.now += 0.25
        run.happens(TimePassed())
    pauses = [later - at for at, later in itertools.pairwise(given)]
    assert max(pauses[:2]) <= 0.25 and pauses[2:7] == [0.5, 1.0, 2.0, 4.0, 8.0] and max(pauses) == MAX_RETRY_SECONDS
    run.happens(TrainingStarted(MEMBERS[0], run.state.order))
    run.lost(MEMBERS[2], "killed")
    run.paused(MEMBERS[:2])
    assert run.state.vain == 0


def test_another_death_while_a_schedule_is_planned_is_planned_for():
    """The first answer is of no use when it comes; nobody is told of it."""
    run = Run(WIDE)
    run.ran(0, WIDE_MEMBERS)
    run.planner.slow = True
    one, other, *others = WIDE_MEMBERS
    run.lost(one, "killed", 1.0)
    run.paused([other, *others])
    assert run.planner.asked == [(one, BACK)] and run.last(Train, other).order == 1
    run.lost(other, "killed", 2.0)
    run.planner.answer((one, BACK))
    run.happens(TimePassed())
    assert run.planner.asked == [(one, other, BACK)] and run.last(Train, others[0]).order == 1
    run.planner.answer((one, other, BACK))
    run.happens(TimePassed())
    order = run.last(Train, others[0])
    assert order.order == 2 and [seat.worker for seat in decode(bytes(order.schedule)).seats] == others


def test_one_that_has_paused_and_whose_connection_has_ended_gets_no_order():
    """Workers of one machine die together: one has lost the other, and paused, before its own end is known."""
    run = Run(WIDE)
    run.ran(0, WIDE_MEMBERS)
    one, other, *others = WIDE_MEMBERS
    run.lost(one, "killed", 1.0)
    run.paused([other])
    run.happens(WorkerDisconnected(other))
    run.paused(others)
    assert run.last(Train, others[0]).order == 1
    run.lost(other, "killed", 2.0)
    assert run.last(Train, others[0]).order == 2 and run.last(Train, other).order == 1
    for worker in others:
        run.started(worker, 2)
    assert [recovery.dead for recovery in run.recoveries] == [(one, other)]


def test_all_workers_of_a_machine_are_one_failure():
    one, other = WIDE_MEMBERS[:2]
    run = Run(WIDE, [(one, other), WIDE_MEMBERS[2:], [BACK]], MoveCost([1] * 4, None))
    run.ran(0, WIDE_MEMBERS)
    expected = run.state.settler.expected_seconds_to_failure(run.now)
    run.lost(one, "killed", 1.0)
    after_one = run.state.settler.expected_seconds_to_failure(run.now)
    assert after_one == pytest.approx(expected / 2, rel=0.01)
    assert not [event for event in run.events if isinstance(event, NodeLost)]
    run.lost(other, "killed, too", 1.0)
    assert run.state.settler.expected_seconds_to_failure(run.now) == pytest.approx(after_one, rel=0.01)
    (event,) = (event for event in run.events if isinstance(event, NodeLost))
    assert (event.node, event.workers) == (0, (one, other))
    run.paused(WIDE_MEMBERS[2:])
    *none, recovery = [run.started(worker, 2) for worker in WIDE_MEMBERS[2:]]
    assert not any(none)
    assert recovery.dead == (one, other) and recovery.nodes == (0,)
    assert str(recovery).startswith("killed, killed, too, so that node 0 is lost: iteration 1 runs on 3 workers")


def test_a_worker_that_is_lost_while_a_schedule_is_planned_may_have_been_the_last(run):
    run.ran(0)
    run.planner.slow = True
    run.lost(Worker(1, 0), "killed", 1.0)
    run.paused(MEMBERS[:2])
    run.lost(Worker(0, 1), "killed, too", 2.0)
    with pytest.raises(RunError, match="stage 1 has no live worker left: killed, too"):
        run.can_read(Worker(0, 0))


def test_who_is_ready_while_a_schedule_is_planned_comes_in_later(run):
    """Nobody waits for its layers."""
    run.ran(0)
    run.planner.slow = True
    run.lost(Worker(1, 0), "killed", 1.0)
    run.paused(MEMBERS[:2])
    first = (Worker(1, 0), BACK)
    run.ready(Worker(1, 0))
    assert run.planner.asked == [first] and run.last(Train).order == 1
    run.planner.answer(first)
    run.happens(TimePassed())
    assert run.last(Train).order == 2 and run.state.order == 2
    assert run.planner.asked == []
    run.happens(TimePassed())
    assert run.last(Fetch).order == 2 and run.last(Fetch).moves


def test_no_schedule_is_told_when_the_answer_comes(run):
    run.ran(0)
    run.planner.slow = True
    run.lost(Worker(1, 0), "killed", 1.0)
    run.paused(MEMBERS[:2])
    run.planner.answer((Worker(1, 0), BACK), NoScheduleError("the table has none"))
    with pytest.raises(RunError, match=r"^killed, and the table has none$"):
        run.happens(TimePassed())


def test_members_train_on_where_there_is_no_schedule_for_who_comes_back(run):
    run.planner.answer((), NoScheduleError("the table has none"))
    run.ran(0)
    run.ready(BACK)
    assert run.ran(1) == [False] * 3 and run.last(Fetch) is None and run.last(EndOrder) is None


def test_a_lost_stage_names_all_who_may_have_held_it(run):
    """Also one that was never there, and one that is back too late; not those of other stages."""
    run.ran(0)
    run.lost(Worker(1, 0), "worker 1.0 was killed")
    run.paused(MEMBERS[:2])
    run.lost(Worker(0, 1), "worker 0.1 was killed")
    run.paused(MEMBERS[:1])
    with pytest.raises(RunError, match=r"^stage 1 has no live worker left: worker 0\.1 was killed, worker 1\.1 was not "
                                       r"there from the start; no live worker can read a checkpoint, or build what the "
                                       r"run began with$"):
        run.can_read(Worker(0, 0))


def test_a_stage_whose_last_holder_dies_while_another_fetches_its_layers(run):
    run.ran(0)
    run.ready(BACK)
    assert run.lost(BACK, "killed again") is False
    run.ready(BACK)
    assert run.lost(Worker(0, 1), "worker 0.1 was killed") is True
    run.paused([Worker(0, 0), Worker(1, 0)])
    with pytest.raises(RunError, match=r"worker 0\.1 was killed, worker 1\.1 is back, but has no layers yet; no live"):
        for worker in (Worker(0, 0), Worker(1, 0), BACK):
            run.can_read(worker)


def lose_stage_1(run):
    """With 1.1 back, and without layers, after iteration 2."""
    for iteration in range(3):
        run.ran(iteration)
    run.ready(BACK)
    run.lost(Worker(0, 1), "killed")
    run.paused([Worker(0, 0), Worker(1, 0)])


def test_where_nobody_holds_a_stage_all_that_live_go_back_to_the_newest_checkpoint_that_any_can_read(run):
    """Who cannot read it gets its layers from who can, who reads them besides its own."""
    lose_stage_1(run)
    assert all(run.last(ReportCheckpoints, worker) for worker in (Worker(0, 0), Worker(1, 0), BACK))
    run.can_read(Worker(0, 0), 0, 2)
    run.can_read(BACK, 0, 1)
    assert run.state.order == 1
    run.can_read(Worker(1, 0), 0, 99)
    order = run.last(Train)
    assert order == run.last(Train, BACK) and order.order == 2 and order.first_iteration == 2
    assert order.restore == ((Worker(0, 0), (0, 1, 2, 3)),)
    assert sorted(order.moves) == [move(Worker(1, 0), Worker(0, 0), 0), move(Worker(1, 0), Worker(0, 0), 1),
                                   move(BACK, Worker(0, 0), 2), move(BACK, Worker(0, 0), 3)]
    assert run.log.next_iteration == 2 and run.back == [2]
    recovery = [run.started(worker, 2) for worker in sorted(run.state.members)][-1]
    assert (recovery.went_back_to, recovery.repeated, recovery.returned) == (2, 1, (BACK,))


def test_one_that_dies_before_it_has_said_what_it_can_read_is_not_waited_for(run):
    lose_stage_1(run)
    run.can_read(Worker(0, 0), 0)
    run.can_read(BACK, 0)
    run.lost(Worker(1, 0), "killed, too")
    assert run.last(Train).restore == ((Worker(0, 0), (0, 1)), (BACK, (2, 3))) and run.last(Train).first_iteration == 0


def test_they_go_back_once_more_where_what_they_have_read_is_lost_again(run):
    """Before all have read it, or because it could not be read; each is asked anew."""
    lose_stage_1(run)
    for worker in (Worker(0, 0), Worker(1, 0), BACK):
        run.can_read(worker, 0, 1, 2)
    assert run.last(Train).first_iteration == 2
    for worker in (Worker(0, 0), Worker(1, 0), BACK):
        run.happens(Paused(worker, 2, holding() if worker == BACK else holding((0, 2)), None, "it is damaged"))
    run.happens(TimePassed())
    for worker in (Worker(0, 0), Worker(1, 0), BACK):
        run.can_read(worker, 0, 1)
    assert run.last(Train).order == 3 and run.last(Train).first_iteration == 1 and run.back == [2, 1]
    recovery = [run.started(worker, 3) for worker in sorted(run.state.members)][-1]
    assert (recovery.went_back_to, recovery.repeated) == (1, 2)


def test_a_worker_that_cannot_look_which_checkpoints_there_are_is_not_waited_for(run):
    """Its file system hangs: its main thread sends heartbeats all the same."""
    lose_stage_1(run)
    run.can_read(Worker(0, 0), 0)
    run.can_read(BACK, 0, 2)
    run.now += checkpoint_rollback.CHECKPOINT_ANSWER_SECONDS / 2
    run.happens(TimePassed())
    assert run.state.order == 1
    run.now += checkpoint_rollback.CHECKPOINT_ANSWER_SECONDS
    run.happens(TimePassed())
    assert run.last(Train).first_iteration == 2 and dict(run.last(Train).restore).keys() == {BACK}


def test_where_only_one_can_read_a_checkpoint_who_has_nothing_to_do_an_older_one_is_taken(run):
    run.planner.answers[()] = prepared(schedule_for(JOB, [str(BACK)]))  # 1.1 takes no part in it
    lose_stage_1(run)
    run.ready(Worker(0, 1))
    run.can_read(Worker(0, 1))
    run.can_read(Worker(0, 0), 1)
    run.can_read(Worker(1, 0))
    run.can_read(BACK, 2)
    assert run.last(Train).first_iteration == 1 and dict(run.last(Train).restore).keys() == {Worker(0, 0)}


def test_nobody_goes_on_before_one_has_reported_that_runs_no_microbatch():
    """It passes nothing on that others would wait for: they could be two steps ahead of it, and could not go back."""
    run = Run()
    idle, schedule = BACK, schedule_for(JOB, [str(BACK)])
    sums = tuple(op for op in schedule.programs[schedule.seat_of[Worker(0, 1)].program] if op.kind not in COMPUTE_KINDS)
    with_it = replace(schedule, failed=(), programs=(*schedule.programs, sums), seats=tuple(sorted(
        (*schedule.seats, Seat(idle, idle, len(schedule.programs))), key=lambda seat: seat.worker)))
    run.planner.answers[()] = prepared(with_it)
    run.ran(0)
    run.ready(idle)
    run.fetch_up_to_date(FIRST_FETCH)
    run.ran(1), run.ran(2), run.paused()
    assert run.state.order == 2 and run.last(Train, idle) is not None

    def ran(worker, iteration):
        run.happens(IterationReport(worker, 2, iteration, 0.0, 1.0))

    for worker in MEMBERS:
        ran(worker, 3)
    assert [run.last(Acknowledged, worker).order for worker in MEMBERS] == [1, 1, 1]
    ran(idle, 3)
    assert [run.last(Acknowledged, worker) for worker in (*MEMBERS, idle)] == [
        Acknowledged(2, 3, committed=(3, 0.0))] * 4


def test_reports_that_a_node_has_gathered_are_acknowledged_in_one_message():
    run = Run()
    late, mine = IterationReport(MEMBERS[0], 0, 0, 0.0, 1.0), [IterationReport(worker, 1, 0, 0.0, 1.0)
                                                               for worker in MEMBERS]
    run.state, effects = apply_event(run.rules, run.state, ReportsReceived((late, *mine)), run.now)
    assert [one for one in effects if isinstance(one, SendMessage)] == [
        SendMessage((MEMBERS[0],), Acknowledged(0, 0)),
        SendMessage(tuple(MEMBERS), Acknowledged(1, 0, committed=(0, 0.0)))]
    assert run.log.next_iteration == 1


@pytest.mark.parametrize("later", [[], MEMBERS[:1], [MEMBERS[0], MEMBERS[2]]])
def test_workers_told_to_end_while_the_layers_of_one_are_saved_leave_after_it_and_the_last_ends_the_run(run, later):
    """0.1 holds stage 1 alone, so that all save a checkpoint before it leaves."""
    run.ran(0)
    run.happens(Leaving(Worker(0, 1)))
    for iteration in (1, 2):
        run.ran(iteration)
    run.paused()
    finish = run.last(Finish)
    assert finish is not None and not finish.parameters
    for worker in later:
        run.happens(Leaving(worker))
    for worker in MEMBERS:
        run.happens(Finished(worker, finish.order, {}))
    assert run.last(Leave, MEMBERS[-1]) is None and run.last(Publish) == Publish(finish.order)
    for worker in MEMBERS:
        run.happens(Published(worker, finish.order))
    gone = [worker for worker in MEMBERS if run.last(Leave, worker) is not None]
    assert gone == sorted({Worker(0, 1), *later})
    assert isinstance(run.state.phase, EndedPhase) == (len(gone) == len(MEMBERS))


@pytest.mark.parametrize("ahead", [0, 1])
def test_where_the_data_end_all_that_have_samples_is_run_and_saved(run, ahead):
    """A member may find that in the iteration after the one that others still run."""
    run.ran(0)
    end = 1 + ahead
    for worker in MEMBERS:
        held = holding((2 * worker.column, 2 * worker.column + 2))
        run.happens(Paused(worker, 1, held, None, "there are none", data_end=end if worker == MEMBERS[0] else None))
    assert [event.text for event in run.events if isinstance(event, Noted)] == [
        "there are none: the run ends before it"]
    if ahead:
        assert run.last(Train).order == 2 and run.last(Finish) is None
        for worker in MEMBERS:
            run.happens(TrainingStarted(worker, 2), IterationReport(worker, 2, 1, 0.0, 1.0))
        assert all(run.last(Acknowledged, worker).stop for worker in MEMBERS)
        run.paused()
    finish = run.last(Finish)
    assert finish.first_iteration == end and not finish.parameters
    for worker in MEMBERS:
        run.happens(Finished(worker, finish.order, {}))
    for worker in MEMBERS:
        run.happens(Published(worker, finish.order))
    assert isinstance(run.state.phase, EndedPhase)


def other(worker, **parts):
    """One whose job file has another learning rate, or that is another one in other parts."""
    return replace(ready(worker), identity=RunIdentity(**parts or {"training": {"learning_rate": "0.002"}}))


@pytest.mark.parametrize(("parts", "line"), [
    ({"data": {"training data": "1"}}, "the training data are not the same there and in the run"),
    ({"code": {"my_model": "1"}}, "module my_model is used there only"),
    ({"libraries": {"torch": "2.1"}}, "torch is 2.1 there and not given in the run")])
def test_whatever_is_other_at_a_return_is_named(parts, line, run):
    run.ran(0)
    run.happens(other(BACK, **parts))
    (noted,) = [event for event in run.events if isinstance(event, Noted)]
    assert noted.text.endswith(line) and run.ran(1) == [False] * 3


def test_one_that_would_train_something_else_is_refused_and_the_run_continues(run):
    run.ran(0)
    run.happens(other(BACK))
    assert run.last(Leave, BACK) is not None and run.last(Fetch) is None and BACK not in run.state.live
    (noted,) = [event for event in run.events if isinstance(event, Noted)]
    assert noted.text == ("worker 1.1 is refused, and the run continues without it: training.learning_rate is 0.002 "
                          "there and not given in the run")
    assert run.ran(1) == [False] * 3
    run.ready(BACK)  # with the right job file
    assert run.last(Fetch, BACK) is not None


def test_no_run_begins_with_one_that_would_train_something_else(run):
    state = build_initial_state(run.rules, CommitLog(), run.now)
    with pytest.raises(CommitLogError, match=r"^worker 0\.0 would not train what node 0 does: training\.learning_rate"):
        apply_event(run.rules, state, other(MEMBERS[0]), run.now)


def test_a_new_node_0_that_would_train_something_else_leaves_the_workers_to_another_one(run):
    phase = RejoiningPhase(losses=(1.0,), first=0, expected=frozenset(MEMBERS), grid=frozenset(MEMBERS), began=0.0)
    state = build_initial_state(run.rules, CommitLog(), run.now, phase)
    known = RecoveryReport(1, (BACK,), 0, holding((0, 2)), None, pending=False)
    with pytest.raises(OtherRunError, match=r"^worker 0\.0 is of a run that this job does not continue: training\."):
        apply_event(run.rules, state, replace(other(MEMBERS[0]), known=known), run.now)
    _, effects = apply_event(run.rules, state, other(MEMBERS[0]), run.now)  # just started: only itself is wrong
    assert [effect.message for effect in effects if isinstance(effect, SendMessage)] == [Leave()]


def read(worker, iteration, digest="a", deal=""):
    """A report that compares samples; the two workers of a pipeline read its micro-batch."""
    return IterationReport(worker, 1, iteration, 0.0, 1.0, samples=(SampleDigest(worker.pipeline, 0, digest),),
                           deal=deal)


def gave_up(effects):
    return [(effect.worker, effect.reason) for effect in effects if isinstance(effect, GiveUpWorker)]


def test_a_run_whose_workers_read_different_samples_ends_with_one_line(run):
    run.happens(read(MEMBERS[0], 0), read(MEMBERS[2], 0))
    with pytest.raises(RunError, match=r"^workers 0\.0, 0\.1 have different samples for micro-batch 0 of pipeline 0 in "
                                       r"iteration 0; expected the same on every worker"):
        run.happens(read(MEMBERS[1], 0, "b"))


def test_workers_that_read_the_same_samples_go_on(run):
    run.happens(*(read(worker, 0) for worker in MEMBERS))
    assert run.log.next_iteration == 1


@pytest.mark.parametrize("what", ["digest", "deal"])
def test_one_that_has_just_joined_and_reads_otherwise_is_given_up(what, run):
    """The iteration is run again without it."""
    run.state = replace(run.state, newcomers=frozenset({MEMBERS[1]}))
    run.happens(read(MEMBERS[0], 0), read(MEMBERS[2], 0), read(MEMBERS[1], 0, **{what: "b"}))
    assert run.log.next_iteration == 0 and run.last(EndOrder) == EndOrder(1)
    for worker in MEMBERS[:2]:
        run.paused([worker])
    held = Paused(MEMBERS[2], 1, holding((0, 2)), None, None)
    run.state, effects = apply_event(run.rules, run.state, held, run.now)
    ((given_up, reason),) = gave_up(effects)
    assert given_up == MEMBERS[1] and "than its peers in iteration 0" in reason


def test_one_that_deals_otherwise_than_most_is_given_up(run):
    """Costs may be equal in iteration 0, and different later."""
    run.happens(*(read(worker, 0, deal="x") for worker in MEMBERS))
    run.happens(*(IterationReport(worker, 1, 1, 0.0, 1.0, deal="y" if worker == MEMBERS[2] else "x")
                  for worker in MEMBERS))
    assert run.log.next_iteration == 1 and run.state.faulty == (MEMBERS[2],)


def test_ranks_that_read_different_samples_make_their_worker_wrong(run):
    two = replace(read(MEMBERS[1], 0), samples=(SampleDigest(0, 0, "a"), SampleDigest(0, 0, "b")))
    run.happens(read(MEMBERS[0], 0), read(MEMBERS[2], 0), two)
    assert run.state.faulty == (MEMBERS[1],)


def test_members_that_come_back_are_the_newcomers_of_their_order(run):
    run.ran(0)
    run.ready(BACK)
    run.fetch_up_to_date(FIRST_FETCH)
    run.ran(1)
    run.ran(2)
    run.paused()
    assert run.state.order == 2 and run.state.newcomers == {BACK}


@pytest.mark.parametrize("wrong", [Finished(MEMBERS[2], 0, {"0.weight": "b"}),
                                   Finished(MEMBERS[2], 0, {}, (Checksum(0, 0, 4, True, (2,)),))])
def test_nothing_is_published_where_the_final_state_differs(run, wrong):
    for iteration in run.rules.iterations:
        run.ran(iteration)
    run.paused()
    order = run.last(Finish).order
    for worker in MEMBERS[:2]:
        run.happens(Finished(worker, order, {"0.weight": "a"}, (Checksum(0, 0, 4, True, (1,)),)))
    with pytest.raises(CommitLogError, match=r"final parameter 0\.weight|copies of layer 0 differed"):
        run.happens(replace(wrong, order=order))
    assert run.last(Publish) is None
