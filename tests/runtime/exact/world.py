"""A run of the real coordinator with real workers that train.

Whoever dies, each number is that of one process.
"""

import functools

import torch

from slipstream.runtime.computing.forms import find_forms
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.part_moves import PartitionPlanner
from slipstream.runtime.coordinator.decisions.rebalancing import MoveCost
from slipstream.runtime.coordinator.decisions.run_state import (
    EndedPhase,
    RunRules,
    build_initial_state,
)
from slipstream.runtime.coordinator.decisions.transition import TimePassed
from slipstream.runtime.data.data import load_data
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.state.held_layers import build_holding
from slipstream.runtime.state.part_state import count_elements
from slipstream.runtime.state.step_factors import needs_gradient_norm
from tests.runtime.coordinator.counting_workers import PLACEMENT
from tests.runtime.coordinator.counting_world import ANSWERING, FIRST, WORKERS, World
from tests.runtime.exact.process import CPU, Process
from tests.runtime.exact.wires import Store, Wires
from tests.runtime.failing import WIDE
from tests.runtime.running import judge

ITERATIONS = 6
"""Of a run: enough for one to be lost, and to be back, several times."""
TOLERANCE = 1e-12
MOST = 4
"""Deaths of workers in a run, and of node 0: else it would never end."""
BACK = 0.003
"""How likely a worker that has died is back whenever something happens."""
FLIPS = 0.01
"""And that a bit flips, once it is to: within an iteration."""
LAST_FLIP = ITERATIONS - 4
"""The iteration before which it does: it is to be found before the last step."""
ROUNDS = 60_000
"""Things that happen, at most: far more than a run takes."""


def small(name="Exact", **training):
    """A model whose ops take microseconds."""
    model = {
        "name": f"tests.runtime.exact_parallel:{name}",
        "blocks": 2,
        "width": 4,
        "context": 4,
        "vocabulary": 256,
    }
    return parse_run_config(
        model,
        {
            "batch": 1,
            "dtype": "float64",
            "device": "cpu",
            "iterations": ITERATIONS,
            "learning_rate": 0.05,
            **training,
        },
    )


@functools.cache
def setting(config):
    """What is the same in all runs of a configuration."""
    training = config.training
    model = build_model(config.model, training.seed, parameter_dtype(training), CPU)
    modules = build_holding(model, range(model.layers), training).modules
    partition = PartitionPlanner(
        [count_elements(module) for module in modules.values()],
        PLACEMENT,
        (),
        training.shard_optimizer,
    )
    rules = RunRules(
        first=ANSWERING.prepare_schedule(FIRST),
        iterations=range(ITERATIONS),
        move_cost=MoveCost([1] * model.layers, None),
        mtbf_seconds=1e6,
        automatic_checkpoints=False,
        partition=partition,
    )
    oracle = judge(config, WIDE.microbatches, ITERATIONS)
    return rules, load_data(config, WIDE.microbatches), find_forms(model, config), oracle


def flip_exponent(holding, rng) -> bool:
    """Flip the highest bit of the exponent of a parameter; return whether there is one."""
    parameters = [*holding.parameters_by_name().values()]
    if parameters:
        values = rng.choice(parameters).data.view(-1).view(torch.int64)
        values[rng.randrange(values.numel())] ^= 1 << 62
    return bool(parameters)


class Deviation(AssertionError):
    """A number that is not that of one process."""


class ExactWorld(World):
    """One run; `deaths` and `restarts` are how likely these are whenever something happens.

    `flips` says of what, in one worker, a bit flips, at a moment that the seed chooses.
    """

    def __init__(
        self, rng, out, config, *, nccl, every, deadly, restarts, verify_every=0, flips=None
    ) -> None:
        self.config, self.nccl, self.every, self.restarting = config, nccl, every, restarts
        self.verify_every, self.flips = verify_every, flips
        self.flips_in = None if flips is None else rng.randrange(1, LAST_FLIP)
        self.flipped = self.found = None
        """The iteration in which a bit has flipped, and what was found."""
        self.wrong = None
        """The worker in which it has."""
        self.rules, self.corpus, self.forms, self.oracle = setting(config)
        self.microbatches = WIDE.microbatches
        self.wires, self.store, self.disk_of, self.history = Wires(rng), Store(), {}, []
        self.checked, self.committed_losses = 0, {}
        super().__init__(rng, out, deadly)

    def is_apart(self, worker, other) -> bool:
        """Whether two workers never reach each other."""
        return False

    def takes_nothing(self, worker) -> bool:
        """Whether a worker takes nothing of the layers that it has asked for."""
        return False

    def started(self, rejoining):
        return build_initial_state(
            self.rules,
            CommitLog(validates=needs_gradient_norm(self.config.training)),
            self.now,
            rejoining,
        )

    def fresh(self, worker):
        return Process(worker, self)

    def note(self, what) -> None:
        self.history.append(what)

    def committed(self, commit, report) -> None:
        self.committed_losses[commit.iteration] = commit.loss
        if self.flips_in is None:
            self.check_loss(commit.iteration)
        self.checked += 1
        self.log.write_iteration(commit.iteration, commit.loss, 0.1)

    def check_loss(self, iteration) -> None:
        found, right = self.committed_losses[iteration], self.oracle.losses[iteration]
        if not abs(found - right) <= TOLERANCE:
            raise Deviation(f"the loss of iteration {iteration} is {found!r}, right is {right!r}")

    def save(self, iteration, states) -> None:
        self.disk_of.setdefault(iteration, {}).update(states)
        self.saved += bool(states)

    def complete(self):
        return [
            iteration
            for iteration, layers in self.disk_of.items()
            if len(layers) == PLACEMENT.layer_count
        ]

    def drop_saved(self, iteration) -> None:
        for newer in [iteration_ for iteration_ in self.disk_of if iteration_ > iteration]:
            del self.disk_of[newer]

    def happens(self, event) -> None:
        order = self.state.order
        super().happens(event)
        self.found = self.found or self.state.log.difference
        if self.state.order != order:
            self.note(
                f"order {self.state.order} from iteration {self.state.log.next_iteration}, "
                f"{len(self.state.members)} members"
            )

    def kill(self, worker) -> None:
        if self.deaths == MOST:
            return
        self.note(f"{worker} dies")
        process = self.workers[worker]
        process.kill()
        super().kill(worker)

    @property
    def may_restart(self) -> bool:
        return self.restarts < MOST and self.restarting > 0

    def restart(self) -> None:
        self.note("node 0 dies")
        self.store = Store()
        super().restart()

    def forget(self, worker) -> None:
        if self.workers[worker].order is not None:
            self.workers[worker].kill()
        super().forget(worker)

    def flip(self) -> None:
        """A bit of what a worker holds flips."""
        what, worker = self.flips, self.rng.choice([*self.workers])
        holding = self.workers[worker].context.layer_store.holding
        if (
            flip_exponent(holding, self.rng)
            if what == "exponent"
            else holding.optimizer.flip_bit(what, self.rng)
        ):
            self.flips, self.flipped, self.wrong = None, self.state.log.next_iteration, worker
            self.note(f"a bit of the {what} of {worker} flips in iteration {self.flipped}")

    def act(self) -> None:
        """One thing happens, of all that may."""
        rng = self.rng
        if (
            self.flips is not None
            and self.state.log.next_iteration >= self.flips_in
            and rng.random() < FLIPS
        ):
            self.flip()
        if rng.random() < self.deadly and self.workers:
            self.kill(rng.choice([*self.workers]))
        if rng.random() < self.restarting and self.may_restart:
            self.restart()
        for worker in WORKERS:
            if worker not in self.workers and rng.random() < BACK:
                self.note(f"{worker} is back")
                self.workers[worker] = self.fresh(worker)
        acted = self.step()
        self.now += 0.02
        if not acted or rng.random() < 0.02:
            self.now += 0.0 if acted else 0.5
            self.write(len(self.unwritten) * (self.disk.random() < 0.1))
            if self.taking_over is None or self.taking_over.reports:
                self.happens(TimePassed())

    def step(self) -> bool:
        """Do one thing that can be done.

        It is of a worker drawn at random, or on the wires.

        Returns False if there is none.
        """
        actors = [*self.workers.values(), self.wires, self.wires]
        first = self.rng.randrange(len(actors))
        for actor in (*actors[first:], *actors[:first]):
            if can := [*actor.can()]:
                getattr(actor, self.rng.choice(can))()
                return True
        return False

    def play(self) -> None:
        """To the end. Raises Deviation."""
        try:
            for _ in range(ROUNDS):
                self.act()
                if isinstance(self.state.phase, EndedPhase):
                    break
            else:
                raise AssertionError("the run hangs")
        finally:
            for process in self.workers.values():
                process.kill()

    @property
    def parameters(self):
        """Of the last checkpoint."""
        return {
            f"{layer}.{key.removeprefix('model.')}": tensor
            for layer, state in self.disk_of[self.state.log.next_iteration].items()
            for key, tensor in state.items()
            if key.startswith("model.")
        }

    def check_end(self) -> None:
        """All iterations have been run, and the parameters are those of one process."""
        assert self.checked >= ITERATIONS
        # Where a bit has flipped, some were wrong until that was found.
        for iteration in self.committed_losses:
            self.check_loss(iteration)
        if self.state.log.next_iteration not in self.complete():
            return
        for name, right in self.oracle.parameters.items():
            found = self.parameters[name].view_as(right)
            if not torch.allclose(found, right, rtol=0, atol=TOLERANCE):
                raise Deviation(f"parameter {name} is off by {(found - right).abs().max()}")
