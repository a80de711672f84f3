"""What a transcript calls each event, effect and state of a run.

Each has one line. Schedules are named by the workers that are down in them, so that no line depends
on a planner.

Schedules are named by the workers that are down in them, so that no line depends on a planner.
"""

from collections.abc import Collection, Iterable
from itertools import groupby

from msgspec.structs import asdict

from slipstream.runtime.coordinator.decisions.commit_log import CommittedIteration
from slipstream.runtime.coordinator.decisions.effects import (
    GiveUpWorker,
    ScheduleAnswer,
    ScheduleRequest,
    SendMessage,
)
from slipstream.runtime.coordinator.decisions.failover import FailoverResult, RejoiningPhase
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.run_state import (
    EndedPhase,
    FinishingPhase,
    GatheringPhase,
    RunState,
    TrainingPhase,
)
from slipstream.runtime.coordinator.decisions.slow_workers import (
    SpeedAnswer,
    SpeedDecision,
    SpeedEvent,
    SpeedRequest,
)
from slipstream.runtime.coordinator.decisions.transition import (
    ReportsReceived,
    StallFound,
    WorkerLost,
)
from slipstream.runtime.events import Event, OrderGiven, SettlingChosen
from slipstream.runtime.protocol.to_coordinator import (
    CheckpointSaved,
    Checksum,
    FetchFailed,
    FetchUpToDate,
    Finished,
    HeldState,
    IterationReport,
    Paused,
    ReadableCheckpoints,
    Ready,
    StepValidated,
)
from slipstream.runtime.protocol.to_worker import (
    Acknowledged,
    AssignedShare,
    EndOrder,
    Fetch,
    Finish,
    LayerMove,
    ScheduleContent,
    Train,
)
from slipstream.schedules.layers import LayerRange, merge_ranges
from slipstream.schedules.schedule import Worker

RIGHT = 1
"""Checksum of a copy, and digest of a sample, as they should be.

Only others are written down.
"""
MAX_ABSENT = 2
"""Workers that a group is said to lack, at most.

Where more lack, those that it has are named.
"""


class Namer:
    """Names groups of the workers of one grid."""

    def __init__(self, workers: Collection[Worker]) -> None:
        self._workers = frozenset(workers)

    def name(self, workers: Iterable[Worker]) -> str:
        """All of them, all but some, or each."""
        group = frozenset(workers)
        absent = sorted(self._workers - group)
        if group == self._workers:
            return "all"
        if len(absent) <= MAX_ABSENT < len(group):
            return f"all but {' '.join(map(str, absent))}"
        return " ".join(map(str, sorted(group))) or "none"

    def name_schedule(self, down: Collection[Worker]) -> str:
        """A schedule by who is down in it."""
        if not down:
            return "the whole schedule"
        return f"the schedule without {' '.join(map(str, sorted(down)))}"


def describe_layers(layers: Iterable[LayerRange]) -> str:
    """Layers by their first and last."""
    texts = []
    for start, stop in layers:
        texts.append(str(start) if stop == start + 1 else f"{start}-{stop - 1}")
    return " ".join(texts) or "nothing"


def _name_layers(layers: Iterable[int]) -> str:
    return f"layers {describe_layers(merge_ranges((layer, layer + 1) for layer in layers))}"


def _name_speeds(speeds: Iterable[tuple[Worker, float]]) -> str:
    return " ".join(f"{worker} x {factor:g}" for worker, factor in speeds)


def describe_moves(moves: Iterable[LayerMove]) -> str:
    """Who sends whom which layers."""

    def ends(move: LayerMove) -> tuple[Worker, Worker]:
        return move.source, move.target

    texts = []
    for (source, target), group in groupby(sorted(moves, key=ends), key=ends):
        texts.append(f"{source} -> {target} {_name_layers(move.layer for move in group)}")
    return ", ".join(texts)


def _join(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def _holds(kept: HeldState) -> str:
    return f"holds {describe_layers(merge_ranges(kept.layers))}"


def _describe_copies(checksums: Iterable[Checksum]) -> list[str]:
    texts = []
    for checksum in checksums:
        if checksum.sums[0] != RIGHT:
            part = "state" if checksum.state else "parameters"
            texts.append(f"other {part} of layer {checksum.layer}")
    return texts


def describe_event(event: object, names: Namer) -> tuple[str, str]:
    """Who reports an event, and what."""
    who = str(getattr(event, "worker", "node 0"))
    kind = type(event).__name__
    match event:
        case Ready():
            rejoining = event.known
            again = ""
            if rejoining is not None:
                stepped = f"stepped {rejoining.iteration}"
                again = f"order {rejoining.order}, {stepped}, {_holds(rejoining.kept)}"
                again = _join(again, "in doubt" if rejoining.doubted else "")
            other = [
                f"{part}.{key} = {value}"
                for part, values in asdict(event.identity).items()
                for key, value in values.items()
            ]
            return who, " ".join(filter(None, (kind, _join(again, *other))))
        case IterationReport():
            samples = [
                f"other sample {sample.pipeline}.{sample.index}"
                for sample in event.samples
                if sample.digest != str(RIGHT)
            ]
            loss = "" if event.loss is not None else "loss nan"
            return who, _join(
                f"{kind} {event.iteration}",
                loss,
                *_describe_copies(event.checksums),
                *samples,
                "other deal" if event.deal != str(RIGHT) else "",
            )
        case ReportsReceived():
            reports = " ".join(f"{report.worker}:{report.iteration}" for report in event.reports)
            return "node agent", f"{kind} {reports}"
        case StepValidated():
            return "a worker", f"{kind} {event.factor.iteration} factor {event.factor.factor}"
        case Paused():
            return who, _join(
                f"{kind} {event.order}",
                _holds(event.kept),
                event.reason or "",
                "" if not event.named else f"names {names.name(event.named)}",
            )
        case FetchUpToDate() | FetchFailed():
            return who, _join(f"{kind} {event.fetch}", getattr(event, "reason", ""))
        case Finished():
            digests = [
                f"other digest of {name}"
                for name, digest in event.digests.items()
                if digest != str(RIGHT)
            ]
            return who, _join(f"{kind} {event.order}", *_describe_copies(event.checksums), *digests)
        case CheckpointSaved():
            return who, f"{kind} {event.iteration}"
        case ReadableCheckpoints():
            return who, f"{kind} {' '.join(map(str, event.iterations)) or 'none'}"
        case WorkerLost():
            return who, f"{kind}: {event.reason}"
        case StallFound():
            return "watch", f"{kind} {names.name(event.workers)}: {event.reason}"
        case ScheduleAnswer():
            what = f"{event.question.phase}, {names.name_schedule(event.question.down)}"
            if isinstance(event.answer, Exception):
                what = f"{what}: none{f', {event.answer}' if str(event.answer) else ''}"
            return "planner", f"{kind} {what}"
        case SpeedAnswer():
            return "planner", f"{kind} {_describe_decision(event.answer, names)}"
    order = getattr(event, "order", None)
    return who, kind if order is None else f"{kind} {order}"


def _describe_decision(decision: SpeedDecision | BaseException, names: Namer) -> str:
    if isinstance(decision, BaseException):
        return str(decision)
    if decision.left_out:
        return names.name_schedule(decision.left_out)
    if decision.reason is not None or decision.seconds >= decision.present_seconds:
        return decision.reason or "the schedule stays"
    return "another schedule"


def describe_effect(effect: object, names: Namer, event: object) -> list[str]:
    """What the coordinator does; a worker that has just reported is "it"."""
    match effect:
        case SendMessage(message=ScheduleContent() | AssignedShare()):
            return []  # what a schedule is made of
        case SendMessage():
            recipients = names.name(effect.workers)
            if effect.workers == (getattr(event, "worker", None),):
                recipients = "it"
            return [f"-> {recipients}: {_describe_message(effect.message, names)}"]
        case GiveUpWorker():
            return [f"give up {effect.worker}: {effect.reason}"]
        case CommittedIteration():
            return [f"commit {effect.iteration}, loss {effect.loss:g}"]
        case ScheduleRequest():
            how = " from a checkpoint" if effect.from_checkpoint else ""
            if effect.held and not effect.rebalanced:
                how = " as layers are"
            speeds = f"for {_name_speeds(effect.speeds)}" if effect.speeds else ""
            return [
                _join(f"ask planner {effect.phase}{how}", names.name_schedule(effect.down), speeds)
            ]
        case SpeedRequest():
            return [f"ask planner for speeds {_name_speeds(effect.speeds) or 'as usual'}"]
        case FailoverResult():
            return [
                _join(
                    f"found order {effect.order}",
                    f"committed {effect.committed}",
                    f"missing {names.name(effect.missing)}",
                    "in doubt" if effect.doubted else "",
                )
            ]
        case Recovery():
            return [f"tell: {effect}"]
        case str():
            return [f"tell: {effect.partition(':')[0]}"]  # what follows depends on the plan
        case SpeedEvent():
            speeds = _name_speeds((change.worker, change.factor) for change in effect.changes)
            left_out = f"left out {names.name(effect.left_out)}" if effect.left_out else ""
            return [f"tell: {_join(speeds, left_out)}"]
        case OrderGiven():
            return [f"log order_given {effect.order}, {effect.live} live, {effect.phase}"]
        case SettlingChosen():
            return [f"log settling_chosen {'moves' if effect.settles else 'stays'}"]
        case Event():
            fields = {
                key: value
                for key, value in asdict(effect).items()
                if key not in Event.__struct_fields__
            }
            texts = []
            for key, value in fields.items():
                if key == "workers":
                    texts.append(names.name(value))
                else:
                    texts.append(f"{value:g}" if isinstance(value, float) else str(value))
            return [f"log {effect.__struct_config__.tag} {', '.join(texts)}"]
    raise TypeError(f"{effect!r}: a transcript has no line for it")


def _describe_message(message: object, names: Namer) -> str:
    kind, order = type(message).__name__, getattr(message, "order", None)
    match message:
        case Train():
            restored = [
                f"{worker} reads {_name_layers(layers)}" for worker, layers in message.restore or ()
            ]
            return _join(
                f"{kind} {order} from {message.first_iteration}",
                names.name_schedule(message.failed),
                f"fetch {message.fetch}" if message.fetch else "",
                *restored,
                describe_moves(message.moves),
            )
        case Fetch():
            return _join(f"{kind} {message.number}", describe_moves(message.moves) or "nothing")
        case Finish():
            what = "parameters" if message.parameters else "a checkpoint"
            writers = sorted(message.writers, key=lambda pair: pair[1])
            shares = []
            for worker, group in groupby(writers, key=lambda pair: pair[1]):
                shares.append(f"{worker} writes {_name_layers(layer for layer, _ in group)}")
            return _join(
                f"{kind} {order} at {message.first_iteration}",
                what,
                *shares,
                describe_moves(message.moves),
            )
        case Acknowledged():
            committed = "" if message.committed is None else f"committed {message.committed[0]}"
            stop = "stop" if message.stop else ""
            return _join(
                f"{kind} {message.iteration}", committed, stop, "save" if message.save else ""
            )
        case EndOrder():
            return _join(f"{kind} {order}", "in doubt" if message.doubted else "")
    return kind if order is None else f"{kind} {order}"


def describe_state(state: RunState, names: Namer) -> dict[str, str]:
    """Describe what decisions depend on, by its name.

    What a reader sees in the messages is left out.
    """
    phase, stop, save = state.phase, None, None
    match phase:
        case GatheringPhase():
            text = "gathering"
        case RejoiningPhase():
            text = "looking for workers"
        case TrainingPhase():
            text = f"order {state.order}{' is over' if phase.ended else ''}"
            stop, save = phase.stop_before, phase.save_before
        case FinishingPhase():
            text = f"order {state.order} finishes{', outdated' if phase.outdated else ''}"
        case EndedPhase():
            text = "the run has ended"
    flags = {"asked to end": state.stopping, "planning": state.is_planning}
    values = {
        "stop before": stop,
        "save before": save,
        "doubt": state.doubt,
        "data end": state.data_end,
        "orders in vain": state.vain or None,
        "empty orders": state.empty.number or None,
        "failures": None if state.rebalancing is None else state.rebalancing.failures,
    }
    groups = {
        "leaving": state.leaving,
        "left out": frozenset(state.slow.left_out),
        "faulty": frozenset(state.faulty),
        "newcomers": state.newcomers if state.order > 1 else frozenset(),
        "waiting": state.waiting_workers,
    }
    return {
        "": text,
        "members": names.name(state.members),
        **{name: "yes" for name, is_set in flags.items() if is_set},
        **{name: str(value) for name, value in values.items() if value is not None},
        **{name: names.name(group) for name, group in groups.items() if group},
    }


def describe_change(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """One line with what has changed; none where nothing has."""
    changes = [
        f"{name} {after.get(name, 'no more')}".strip()
        for name in {**before, **after}
        if before.get(name) != after.get(name)
    ]
    return [f"= {'; '.join(changes)}"] if changes else []
