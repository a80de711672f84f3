"""The commands of transcripts: the method `do_x` of `CommandedWorld` for each first word."""

import re

from slipstream.runtime.coordinator.decisions.commit_log import CommitLogError
from slipstream.runtime.coordinator.decisions.transition import (
    AbortIteration,
    ReportsReceived,
    StallFound,
    StopRequested,
    TimePassed,
    WorkerDisconnected,
)
from slipstream.runtime.errors import NoLiveWorkerError, OtherRunError, RunError
from slipstream.runtime.protocol.to_coordinator import FetchUpToDate, Leaving
from slipstream.runtime.run_identity import RunIdentity
from slipstream.schedules.schedule import Worker
from tests.runtime.coordinator.scripted_world import MESSAGE_SECONDS, ScriptedWorld

ERRORS = (RunError, CommitLogError, OtherRunError, NoLiveWorkerError)
"""With which a run ends."""


class CommandedWorld(ScriptedWorld):
    """One run that is told what happens."""

    def do_train(self, words):
        """`train 3`: until iteration 3 would begin; `train 3 0.0`: only 0.0 does anything."""
        workers = parse_workers(words)
        number = self.rules.iterations.stop + 1 if words.startswith("on") else int(words.split()[0])
        self.limits |= dict.fromkeys(workers or self.grid_workers, number)
        self.settle(workers)

    def do_stabilize(self, words):
        """All that can happen without another iteration; `stabilize 0.0`: only by 0.0."""
        self.settle(parse_workers(words))

    def do_kill(self, words):
        for worker in parse_workers(words):
            self.kill(worker)

    def do_start(self, words):
        """`start 1.1`, or `start 1.1 training.learning_rate=0.002`, which the run has not."""
        for worker in parse_workers(words):
            self.faults.identities.pop(worker, None)
            self.do_identify(words)
            self.workers[worker] = self.fresh(worker)
            self.limits.setdefault(worker, max(self.limits.values(), default=0))

    def do_identify(self, words):
        """`identify 1.1 training.learning_rate=0.002`: as it will say of itself."""
        if match := re.search(r"(\w+)\.([\w ]+)=(\S+)", words):
            part, key, value = match.groups()
            self.faults.identities |= dict.fromkeys(
                parse_workers(words), RunIdentity(**{part: {key: value}})
            )

    def do_disconnect(self, words):
        for worker in parse_workers(words):
            self.happens(WorkerDisconnected(worker))

    def do_leave(self, words):
        """SIGTERM to a worker."""
        for worker in parse_workers(words):
            self.happens(Leaving(worker))

    def do_stop(self, words):
        """SIGTERM to the run."""
        self.happens(StopRequested())

    def do_abort(self, words):
        self.happens(AbortIteration())

    def do_pass(self, words):
        """So many seconds."""
        self.now = round(self.now + float(words) - MESSAGE_SECONDS, 2)
        self.happens(TimePassed())

    def do_planner(self, words):
        """`planner waits`, `planner answers`, or `planner has none without 1.1`.

        `planner idles 1.1`: it gives it no micro-batch; `planner spares 1.1`: nor any layer.
        """
        if words.startswith("has none"):
            self.unplanned.add(parse_workers(words))
            return
        if words.startswith(("idles", "spares")):
            self.idle |= dict.fromkeys(parse_workers(words), words.split()[0])
            return
        self.planner_waits = words == "waits"
        while self.waiting_questions and not self.planner_waits:
            for answer in self.find_answers(self.waiting_questions.pop(0)):
                self.happens(answer)

    def do_lose(self, words):
        """`lose node 0`, or `lose node 0 with 1.1 and 2 lines`.

        It had not written the lines.
        """
        lines = int(found.group(1)) if (found := re.search(r"(\d+) lines", words)) else 0
        for worker in parse_workers(words):
            del self.workers[worker]
        self.restart(len(self.unwritten) - lines)
        self.begin_block("node 0", "another one takes over")
        self.mark_state()

    def do_gather(self, words):
        """What these are about to report is gathered by the agent of their node."""
        for worker in parse_workers(words):
            self.workers[worker].step()
            self.gathered.append(self.workers[worker].said.pop())

    def do_send(self, words):
        """`send gathered`, in one message."""
        reports, self.gathered = tuple(self.gathered), []
        self.happens(ReportsReceived(reports))

    def do_cut(self, words):
        """`cut 1.1 0.0`: these two never reach each other; `cut 1.1`: nor any other."""
        worker, *others = parse_workers(words)
        for other in others or self.grid_workers:
            self.faults.cuts |= {(worker, other), (other, worker)}

    def do_fetched(self, words):
        """`fetched 1.1 1001`: it says so late."""
        (worker,) = parse_workers(words)
        self.happens(FetchUpToDate(worker, int(words.split()[-1])))

    def do_deafen(self, words):
        """`deafen all`: none reaches any other, and each blames itself."""
        self.faults.is_deaf = True

    def do_unwritable(self, words):
        """`unwritable 0.0 0.1`: 0.0 never gets what it is to write from 0.1."""
        writer, source = parse_workers(words)
        self.faults.unwritable[writer] = source

    def do_mend(self, words):
        """Links and fetches."""
        self.faults.cuts.clear()
        self.faults.fetch_failures.clear()

    def do_break(self, words):
        """`break 0.0 1.0`: 0.0 has lost its connection to 1.0."""
        worker, other = parse_workers(words)
        self.workers[worker].pause(f"receiving from worker {other} failed", (worker, other))

    def do_drop(self, words):
        """All layers that these hold."""
        for worker in parse_workers(words):
            self.workers[worker].layers.clear()

    def do_fail(self, words):
        """`fail 0.0: REASON`, which is none of its connections."""
        who, _, reason = words.partition(": ")
        (worker,) = parse_workers(who)
        self.workers[worker].pause(reason)

    def do_fetches(self, words):
        """`fetches of 1.1 fail: REASON`"""
        who, _, reason = words.partition(" fail: ")
        self.faults.fetch_failures |= dict.fromkeys(parse_workers(who), reason)

    def do_stall(self, words):
        worker, other = parse_workers(words)
        self.happens(StallFound((worker, other), f"worker {worker} waits for worker {other}"))

    def do_flip(self, words):
        """`flip 2.0 parameters`, `state` or `digest`: what is wrong of what 2.0 has.

        With `again and again`, it is also wrong after a return to a checkpoint.
        """
        (worker,) = parse_workers(words)
        self.faults.flipped[worker] = words.split()[1]
        self.faults.flips_again = words.endswith("again and again")

    def do_misread(self, words):
        """`misread 0.1 3`: in iteration 3, 0.1 reads another sample."""
        (worker,) = parse_workers(words)
        self.faults.misread = worker, int(words.split()[-1])

    def do_misdeal(self, words):
        """`misdeal 1.0 3`: in iteration 3, 1.0 deals samples otherwise."""
        (worker,) = parse_workers(words)
        self.faults.misdealt = worker, int(words.split()[-1])

    def do_overflow(self, words):
        """`overflow 3`: the next loss of iteration 3 is not finite; `overflow 3 4`: four."""
        iteration, times = map(int, [*words.split(), "1"][:2])
        self.faults.overflows[iteration] = times

    def do_slow(self, words):
        """`slow 1.0 3`: its ops take three times as long from now on."""
        (worker,) = parse_workers(words)
        self.faults.slow[worker] = float(words.split()[-1])

    def do_data(self, words):
        """`data end 4`: there are no samples for iteration 4."""
        self.faults.data_end = int(words.split()[-1])

    def do_reads(self, words):
        """`reads 0.0 0 2`: of the checkpoints, it can read these."""
        (worker,) = parse_workers(words)
        self.faults.reads[worker] = tuple(map(int, words.split()[1:]))

    def do_hang(self, words):
        """Their file systems do, when they look for checkpoints."""
        self.faults.hanging.update(parse_workers(words))

    def do_damage(self, words):
        """A checkpoint that all believe they can read."""
        self.faults.damaged.add(int(words))


class Script:
    """One transcript that is played."""

    def __init__(self, folder) -> None:
        self._folder, self._world = folder, None

    def play(self, commands) -> list[str]:
        """What follows these commands; after "quietly", only how far the run has come."""
        for command in filter(None, map(str.strip, commands.replace("\n", ";").split(";"))):
            try:
                self._do(command)
            except ERRORS as error:
                self._world.over = True
                return [*self._world.take_lines(), f"error: {error}"]
        return self._world.take_lines() or ["nothing"]

    def _do(self, command) -> None:
        verb, _, words = command.partition(" ")
        if verb == "quietly":
            self._do(words)
            self._world.be_quiet()
            return
        if verb == "run":
            size, *options = map(str.strip, words.split(","))
            pipelines, stages = map(int, size.split(" x "))
            assert self._world is None, "one run a transcript"
            self._world = CommandedWorld(
                self._folder / "run", pipelines, stages, dict(map(parse_option, options))
            )
            return
        assert not self._world.over, f"{command}: the run has ended"
        getattr(self._world, f"do_{verb}")(words)


def parse_workers(words):
    """The workers that are named."""
    return tuple(map(Worker.parse, re.findall(r"(?<![\w.=])\d+\.\d+\b", words)))


def parse_option(option):
    """`iterations 12`, `without 1.1`, or only a name."""
    found = re.fullmatch(r"(.+?) ([\d. ]+)", option)
    return found.groups() if found else (option, "")
