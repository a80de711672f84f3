"""One worker's process: it builds its stages, meets the others, runs its program, and leaves its parameters."""

import os
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from runtime.clipping import watches_gradients
from runtime.comm import CommunicationError, Epoch, Transport
from runtime.config import ModelConfig, RunConfig
from runtime.data import Data, Microbatch, load_corpus
from runtime.digest import tensor_digest
from runtime.exchange import Exchange
from runtime.executor import Executor
from runtime.layers import model_for, parameter_dtype
from runtime.membership import Member, MembershipError
from runtime.nursery import Birth
from runtime.optimizer import build_optimizer
from runtime.parameters import save_layer
from runtime.placement import layer_ranges, team
from runtime.recorder import Recorder
from runtime.rendezvous import RendezvousError, connect_store, interface_towards
from runtime.report import Failed, Finished, Joined, Ran, push
from runtime.stage import Stage, boundaries
from runtime.steps import Steps
from schedules.codec import decode
from schedules.schedule import Schedule, Worker

SETUP_KEY = "setup"
SCHEDULE_KEY = "schedule"
JOIN_TIMEOUT = timedelta(minutes=10)
"""For all workers to be there: on several machines, people start them."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers of a run must know besides the schedule."""

    config: RunConfig
    iterations: int
    traced: int
    """How many iterations, the last ones, report when their ops ran."""
    nodes: int
    transport: Transport
    device: Literal["cpu", "cuda"]
    lighthouse: str


def main(birth: Birth) -> int:
    """Run one worker to its end; its exit status. What goes wrong is reported to the launcher."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_towards(birth.rendezvous) or "")
    try:
        store = connect_store(birth.rendezvous)
        try:
            _Run(birth, store).train()
        except (CommunicationError, MembershipError) as error:
            push(store, Failed(birth.worker, "lost", str(error)))
        except Exception as error:
            traceback.print_exc()
            push(store, Failed(birth.worker, "error", f"{type(error).__name__}: {_first_line(error)}"))
        else:
            return 0
    except RendezvousError as error:
        # Without node 0 there is nobody to tell.
        print(error, file=sys.stderr)
    return 1


def warm_up() -> None:
    """Spend once, before workers are forked, the second that each would: torch imports much when first used."""
    config = RunConfig(model=ModelConfig(blocks=1, width=2, heads=1, context=2))
    model = model_for(config.model, 0, torch.float32, torch.device("cpu"))
    boundaries(model, [(0, model.layers)], config)


class _Run:
    """One worker's part in one run."""

    def __init__(self, birth: Birth, store: TCPStore) -> None:
        self._birth = birth
        self._worker = birth.worker
        self._store = store
        self._setup = msgspec.json.decode(store.get(SETUP_KEY), type=Setup)
        self._schedule = decode(store.get(SCHEDULE_KEY))
        self._config = self._setup.config
        self._device = _claim_device(self._setup.device, birth.card)
        torch.set_num_threads(self._config.training.threads)

    def train(self) -> None:
        """Build, meet, run all iterations, save."""
        training = self._config.training
        model = model_for(self._config.model, training.seed, parameter_dtype(training.dtype), self._device)
        ranges = layer_ranges(self._schedule, model.layers)
        stages = {index: Stage(index, ranges[index], model, first=index == 0, last=index == len(ranges) - 1,
                               loss_scale=1 / self._schedule.grid.total_microbatches, config=self._config)
                  for index in _held(self._schedule, self._worker)}
        corpus = load_corpus(self._config)
        with Member(self._setup.lighthouse, self._worker) as member:
            quorum = member.join(JOIN_TIMEOUT)
            epoch = Epoch(quorum, self._worker, {index: team(self._schedule, index) for index in stages},
                          transport=self._setup.transport, device=self._device, rendezvous=self._birth.rendezvous,
                          sums=watches_gradients(training))
            push(self._store, Joined(self._worker, corpus.digest))
            try:
                exchange = Exchange(self._schedule, self._worker, epoch, boundaries(model, ranges, self._config),
                                    range(self._setup.iterations))
                self._iterate(stages, epoch, exchange, corpus, model.layers)
            finally:
                # Even when this worker fails: peers that wait for it are released, and can tell so at once.
                epoch.drop()
        self._finish(stages)

    def _iterate(self, stages: Mapping[int, Stage], epoch: Epoch, exchange: Exchange, corpus: Data,
                 layers: int) -> None:
        recorder = Recorder(self._device, epoch.clock_offset() if self._setup.nodes > 1 else 0.0)
        optimizers = {index: build_optimizer(stage.modules, self._config.training)
                      for index, stage in stages.items()}
        steps = Steps(stages, optimizers, self._config.training, layers=layers,
                      speaks_for=[index for index in stages if team(self._schedule, index)[0] == self._worker],
                      share=epoch.sum_over_all if watches_gradients(self._config.training) else None,
                      staggered=self._schedule.optimizer == "staggered")
        executor = Executor(self._schedule, self._worker, stages=stages, steps=steps, epoch=epoch, exchange=exchange,
                            feed=partial(self._read, corpus), recorder=recorder)
        for iteration in range(self._setup.iterations):
            loss = executor.run(iteration)
            ops = recorder.take()
            traced = iteration >= self._setup.iterations - self._setup.traced
            ran = Ran(self._worker, iteration, loss if abs(loss) < float("inf") else None,
                      max(op.end_seconds for op in ops) - min(op.start_seconds for op in ops),
                      tuple(ops) if traced else ())
            steps.when_settled(partial(push, self._store, ran))
        steps.settle()
        exchange.flush()
        epoch.settle()

    def _read(self, corpus: Data, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        tokens, targets = corpus.batch(microbatch, self._config.training.batch, self._config.model.context)
        return tokens.to(self._device), targets.to(self._device)

    def _finish(self, stages: Mapping[int, Stage]) -> None:
        """The first worker of each stage writes its layers; all tell their digests, which must agree."""
        for index, stage in stages.items():
            if self._worker == team(self._schedule, index)[0]:
                for layer in range(*stage.layers):
                    save_layer(Path(self._birth.out), layer, stage.layer_state(layer))
        digests = {name: tensor_digest(name, parameter) for stage in stages.values()
                   for name, parameter in stage.parameters().items()}
        push(self._store, Finished(self._worker, digests))


def _held(schedule: Schedule, worker: Worker) -> tuple[int, ...]:
    return schedule.grid.stages_of(schedule.seat_of[worker].role.column)


def _claim_device(kind: str, card: int | None) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    assert card is not None
    torch.cuda.set_device(card)
    return torch.device("cuda", card)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["no reason given"])[0]
