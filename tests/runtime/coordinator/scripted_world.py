"""A run of the real coordinator with workers that only count.

Nothing happens but by commands.

A message takes `MESSAGE_SECONDS` of virtual time, an iteration `STEP_SECONDS`. Workers speak in the
order of their names, after all have heard what they were told.
"""

import random
from itertools import groupby
from types import SimpleNamespace

from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.effects import ScheduleRequest
from slipstream.runtime.coordinator.decisions.rebalancing import MoveCost
from slipstream.runtime.coordinator.decisions.run_state import RunRules, build_initial_state
from slipstream.runtime.coordinator.decisions.transition import ReportsReceived, WorkerLost
from slipstream.runtime.coordinator.planning.background import capture_result
from slipstream.runtime.coordinator.planning.schedule_finder import (
    SchedulePlanners,
    ScheduleService,
)
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.protocol.to_coordinator import CheckpointSaved
from slipstream.schedules.schedule import COMPUTE_KINDS, NoScheduleError, OpKind, Seat, Worker
from tests.jobs import grid
from tests.runtime.coordinator import transcribing
from tests.runtime.coordinator.counting_world import World
from tests.runtime.coordinator.holding import partition
from tests.runtime.coordinator.scripted_workers import Faults, Scripted
from tests.runtime.failing import Planning, planned
from tests.runtime.running import schedule_for
from tests.runtime.test_going_back import on_the_spot

MESSAGE_SECONDS = 0.01
STEP_SECONDS = 1.0
LAYER_SECONDS = 0.1
"""To get one layer from another worker."""
MOST_EVENTS = 5000
"""Of one command: far more than any causes."""


class ScriptedWorld(World):
    """One run. `options` has what stands between commas after `run D x S`.

    `iterations 12`; `without 1.1`, which is down at first; `in place`: no planner moves layers;
    `micro-batches 4` of each pipeline; `layers 4 4` of the stages; `checkpoints every 2`; `saves`:
    the coordinator chooses when; `clip`; `compare` copies and samples in each iteration; `settles`;
    `speeds`; `nodes`: each pipeline is a machine.
    """

    may_restart, leaving = False, 0.0

    def __init__(self, out, pipelines, stages, options) -> None:
        self.options, self.faults, self.blocks, self.named_state = options, Faults(), [], {}
        self.clips, self.compares = "clip" in options, "compare" in options
        self.checkpoint_every = int(options.get("checkpoints every", 1000))
        self.limits = {}
        """The iteration that each worker does not begin."""
        self.idle, self.unplanned, self.planner_waits = {}, set(), False
        self.waiting_questions, self.found, self.gathered = [], [], []
        self.over, self.events = False, 0
        self.rules = self.build_rules(pipelines, stages)
        self.grid_workers = sorted(self.first.grid.workers())
        self.names = transcribing.Namer(self.grid_workers)
        super().__init__(random.Random(0), out, 0.0)
        self.refused = self.unfetched = 0.0
        for worker in self.first.failed:
            del self.workers[worker]
        self.mark_state()

    def build_rules(self, pipelines, stages):
        """With a planner for whatever happens, or only for layers in place."""
        options, layers, more = self.options, [2] * stages, "optimizer = 1"
        cuts = range(0, 2 * stages + 1, 2)
        if "layers" in options:
            layers = [int(number) for number in options["layers"].split()]
            more = f"optimizer = 1\n[placement]\nlayers = {layers}"
            cuts = range(sum(layers) + 1)
        job = grid(pipelines, stages, int(options.get("micro-batches", 2)), more=more)
        self.first = schedule_for(job, options.get("without", "").split())
        self.service = self.build_service(job)
        pipelines = groupby(self.first.grid.workers(), key=lambda worker: worker.pipeline)
        machines = [tuple(workers) for _, workers in pipelines]
        return RunRules(
            first=self.service.prepare_schedule(self.first),
            iterations=range(int(options.get("iterations", 100))),
            partition=partition(list(cuts)),
            automatic_checkpoints="saves" in options,
            move_cost=MoveCost([1000] * sum(layers), 1e6) if "settles" in options else None,
            plans_for_speeds="speeds" in options,
            domains=FailureDomains(machines if "nodes" in options else ()),
        )

    def build_service(self, job):
        """What answers requests for schedules, at once."""
        rebalancer, in_place = Planning(job), "in place" in self.options

        def find(down):
            if down in self.unplanned:
                raise NoScheduleError("the table has none")
            plan = planned(job) if in_place else on_the_spot(job)
            idle = [worker for worker in self.idle if worker not in down]
            return with_idle(idle, plan((*down, *idle)), self.idle) if idle else plan(down)

        def at_speeds(down, speeds):
            seats = [seat for seat in self.first.seats if seat.worker not in down]
            holdings = tuple((seat.worker, self.first.held_layers_of_seat(seat)) for seat in seats)
            return rebalancer.plan_at_once(down, holdings, speeds)

        planners = SchedulePlanners(find, at_speeds, None if in_place else rebalancer)
        return ScheduleService(
            self.first.grid,
            planners,
            self.found.append,
            background=lambda work, done, **_: done(capture_result(work)),
        )

    def started(self, rejoining):
        return build_initial_state(self.rules, CommitLog(validates=self.clips), self.now, rejoining)

    def fresh(self, worker):
        self.faults.flipped.pop(worker, None)
        return Scripted(worker, self)

    def is_cut(self, worker, other) -> bool:
        return worker != other and (worker, other) in self.faults.cuts

    # --- what is written down

    def begin_block(self, who, text) -> None:
        """Write down what has happened; `lines` will say what follows."""
        self.blocks.append(SimpleNamespace(at=self.now, who=who, text=text, lines=[]))

    def mark_state(self) -> None:
        """Write down how the state differs from that when it was last written down."""
        before, now = self.named_state, transcribing.describe_state(self.state, self.names)
        self.named_state = now
        if self.blocks:
            self.blocks[-1].lines += transcribing.describe_change(before, now)

    def apply(self, event):
        self.events += 1
        assert self.events < MOST_EVENTS, "it never ends"
        self.now = round(self.now + MESSAGE_SECONDS, 2)
        who, text = transcribing.describe_event(event, self.names)
        self.begin_block(who, text)
        effects = super().apply(event)
        for effect in effects:
            self.blocks[-1].lines += transcribing.describe_effect(effect, self.names, event)
        self.mark_state()
        return effects

    def take_lines(self):
        """What was written down since the last call: equal reports of several workers in one."""

        def key(block):
            return block.text, block.lines, block.who[0].isdigit() or block.who

        lines = []
        blocks = [block for block in self.blocks if block.lines or block.text != "TimePassed"]
        for (text, following, _), group in groupby(blocks, key=key):
            alike = list(group)
            who = [block.who for block in alike]
            named = who[0] if len(who) == 1 else self.names.name(map(Worker.parse, who))
            lines.append(f"{alike[0].at:6.2f} {named}: {text}")
            lines += [f"         {line}" for line in following]
        self.blocks.clear()
        return lines

    def be_quiet(self) -> None:
        """Instead of what was written down, write only where the run is."""
        self.blocks.clear()
        self.begin_block("...", f"iteration {self.state.log.next_iteration} is next")

    # --- what happens

    def find_answers(self, question):
        if question in self.waiting_questions:
            return []
        if self.planner_waits:
            self.waiting_questions.append(question)
            return []
        if isinstance(question, ScheduleRequest):
            self.service.request_schedule(question)
        else:
            self.service.request_speed_decision(question)
        answers, self.found[:] = list(self.found), []
        return answers

    def committed(self, commit, report) -> None:
        if isinstance(report, ReportsReceived):
            report = report.reports[-1]
        before = len(self.happening)
        super().committed(commit, report)
        for saved in self.happening[before:]:
            assert isinstance(saved, CheckpointSaved)
            self.checkpoints.append(saved.iteration)

    def settle(self, only=()) -> None:
        """All that can happen; only these workers act, if any are named."""
        self.events = 0
        while True:
            acting = [worker for worker in sorted(self.workers) if not only or worker in only]
            if self.deliver(acting):
                continue
            if not self.step_all(acting):
                return

    def deliver(self, acting) -> bool:
        """Whether any of them has heard or said anything."""
        heard = False
        for worker in acting:
            while worker in self.workers and self.workers[worker].inbox:
                self.workers[worker].hear()
                heard = True
        for worker in acting:
            while worker in self.workers and self.workers[worker].said:
                self.say(self.workers[worker])
                heard = True
                while self.happening:
                    self.happens(self.happening.pop(0))
        return heard

    def step_all(self, acting) -> bool:
        """Whether any of them has stepped, or got a layer."""

        def progress(process):
            return process.reached, len(process.lacking), len(process.said)

        before, ends = self.now, []
        for worker in acting:
            process = self.workers[worker]
            if process.lacking or process.begun < self.limits.get(worker, 0):
                was = progress(process)
                self.now = round(before + (LAYER_SECONDS if process.lacking else STEP_SECONDS), 2)
                process.step()
                ends += [self.now] if progress(process) != was else []
        self.now = max(ends, default=before)
        return bool(ends)

    def kill(self, worker) -> None:
        gone = self.workers.pop(worker)
        self.deaths += 1
        for message in gone.said:
            self.happens(message)
        self.happens(WorkerLost(worker, f"worker {worker} was killed", self.now))


def with_idle(workers, schedule, kinds):
    """A schedule in which more workers live and only sum and step.

    `kinds` has "idles" or "spares".

    One that is spared does not even hold a layer.
    """
    seats, programs = {**schedule.seat_of}, list(schedule.programs)
    for worker in workers:
        peer = next(seat for seat in schedule.seats if seat.worker.column == worker.column)
        kept = tuple(op for op in schedule.programs[peer.program] if op.kind not in COMPUTE_KINDS)
        spared = kinds[worker] == "spares"
        seats[worker] = Seat(worker, worker, len(programs), () if spared else None)
        programs.append(tuple(op for op in kept if not spared or op.kind is OpKind.O))
    times = schedule.times
    if "spares" in kinds.values():
        times = replace(times, optimizer_of_layer=(1,) * schedule.grid.layer_count)
    failed = tuple(worker for worker in schedule.failed if worker not in workers)
    return replace(
        schedule,
        failed=failed,
        times=times,
        seats=tuple(seats[worker] for worker in sorted(seats)),
        programs=tuple(programs),
    )
