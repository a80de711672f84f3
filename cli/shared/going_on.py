"""How `slipstream train` goes on from a checkpoint: from which, with what command, or that nothing is left to do."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import typer
from torch import Tensor

from slipstream.cli.shared.console import err, print_json
from slipstream.cli.shared.refusals import refusals
from slipstream.cli.shared.train_inputs import checkpoint_or_refuse, find_checkpoint
from slipstream.runtime.config import RunConfig
from slipstream.runtime.model.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    complete,
    identity_of,
    latest,
    newest_whole,
    open_checkpoint,
    require_job,
    require_whole,
    set_aside,
)
from slipstream.runtime.model.checkpoints.parameters import layer_path, load_layer
from slipstream.runtime.model.state.digest import combined_digest, tensor_digest
from slipstream.runtime.model.tensor_codec import TensorError
from slipstream.runtime.run_folder import CHECKPOINTS, iterations_done, left_behind, locked, require_free, saved
from slipstream.schedules.codec import read
from slipstream.schedules.document import DocumentError


def how_to_resume(ctx: typer.Context, folder: Path, resumed: Checkpoint | None) -> str:
    """How to go on after a run that ended early, as a clause, and from whose checkpoint: its own, or that of its start.
    """
    with suppress(CheckpointError):
        newest = latest(folder / CHECKPOINTS)
        if newest is not None and (resumed is None or newest.path.resolve() != resumed.path.resolve()):
            return f"; go on from its checkpoint of iteration {newest.iteration}: {_command(ctx, folder)}"
        if resumed is not None:
            source = folder if newest is not None else resumed.path
            return (f"; it has saved no checkpoint of its own: go on from that of iteration {resumed.iteration} again: "
                    f"{_command(ctx, source)}")
    return "; there is no checkpoint to go on from"


def _command(ctx: typer.Context, source: Path) -> str:
    """The command line that was given, with another --resume."""
    return shlex.join(["slipstream", "train", str(ctx.params["job"]), "--resume", str(source), *_options(ctx)])


def _options(ctx: typer.Context) -> Iterator[str]:
    for option in ctx.command.params:
        name, value = str(option.name), ctx.params.get(str(option.name))
        source = ctx.get_parameter_source(name)
        if name in ("job", "resume", "force") or source is None or source.name != "COMMANDLINE":
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            yield option.opts[0]
            if not isinstance(one, bool):
                yield str(one)


def is_same(resume: Path | None, folder: Path) -> bool:
    """Whether a run goes on in its own folder: schedulers repeat commands, also of runs that have hardly begun."""
    return resume is not None and resume.resolve() == folder.resolve()


def where_to_go_on(resume: Path, folder: Path, *, needed: bool) -> Checkpoint | None:
    """Where to go on from; None where a run goes on in its own folder, and has saved nothing there.

    Where that is `needed`, the checkpoint is whole: damaged ones are named, and those of the run's own folder are set
    aside. Exits 2 where all are damaged.
    """
    if needed:
        whole = _whole_or_refuse(resume, folder)
        if whole is not None:
            return whole
    if is_same(resume, folder) and not saved(folder):
        done = iterations_done(folder)
        if needed:
            err.print(f"{folder}: " + (f"the run there was ended before its first checkpoint: does its {done} "
                                       "iterations again, from iteration 0" if done else
                                       "nothing is there to go on from; starts with iteration 0"),
                      style="yellow", soft_wrap=True)
        return None
    if needed:
        return checkpoint_or_refuse(resume, "--resume ")
    try:
        return find_checkpoint(resume)
    except CheckpointError:
        return None


def _whole_or_refuse(resume: Path, folder: Path) -> Checkpoint | None:
    """The newest whole checkpoint in a folder, or that folder itself; None where there is none at all."""
    with refusals():
        if (resume / MANIFEST).exists():
            return require_whole(open_checkpoint(resume))
        source = next((path for path in (resume / CHECKPOINTS, resume) if complete(path)), resume)
        return take_whole(source, folder, lambda line: err.print(line, style="yellow", soft_wrap=True))


def take_whole(source: Path, folder: Path, say: Callable[[str], object]) -> Checkpoint | None:
    """Find the newest whole checkpoint, for a run in `folder`; None where there is none at all.

    Damaged ones are named. Those of the run's own folder are set aside. Raises CheckpointError where all are damaged,
    and FolderError while another run writes there.
    """
    whole, damaged = newest_whole(source)
    if whole is None and damaged:
        raise CheckpointError(f"{next(iter(damaged.values()))}; no checkpoint in {source} is whole: start anew with "
                              "another --out")
    if damaged and source.resolve() == (folder / CHECKPOINTS).resolve():
        with locked(folder, 0):
            damaged = {set_aside(path): error for path, error in damaged.items()}
    for path, error in damaged.items():
        say(f"{error}; it is kept as {path}, and training goes on from {whole and whole.path}")
    return whole


def require_folder(folder: Path, resume: Checkpoint | None, config: RunConfig, *, force: bool, again: bool) -> None:
    """Refuse what `run` will refuse, before the time for planning is spent."""
    if resume is not None:
        require_job(resume, identity_of(config, len(resume.manifest.layers)))
    if folder.is_dir():
        with locked(folder, 0):
            require_free(folder, resume, config, force=force, again=again)


def nothing_left(folder: Path, resume: Checkpoint, iterations: int, json: bool) -> bool:
    """Say so where a checkpoint has seen all iterations; whether its parameters are there, too."""
    if resume.iteration < iterations:
        return False
    left = left_by(folder, resume, iterations)
    err.print(f"{resume.path} has seen {resume.iteration} iterations of {iterations}: nothing is left to do"
              f"{'' if left else ' but to write the parameters'}; --iterations trains further", style="yellow",
              soft_wrap=True)
    if left is not None and json:
        print_json(left)
    return left is not None


def done_without_this_node(folder: Path, resume: Path | None, iterations: int) -> bool:
    """Whether node 0 finds nothing left to do, as far as its files are seen here: it would be waited for in vain."""
    with suppress(CheckpointError, OSError):
        found = None if resume is None or left_behind(folder) is not None else find_checkpoint(resume)
        return found is not None and all_done(folder, found, iterations)
    return False


def all_done(folder: Path, resume: Checkpoint, iterations: int) -> bool:
    """Whether a run in the folder has done all iterations, and written its parameters. Raises CheckpointError."""
    newest = latest(folder / CHECKPOINTS)
    return (resume.iteration >= iterations and newest is not None and newest.path.resolve() == resume.path.resolve()
            and all(layer_path(folder, layer).exists() for layer in range(len(resume.manifest.layers))))


def left_by(folder: Path, resume: Checkpoint, iterations: int) -> dict[str, object] | None:
    """The answer of `train --json` where a run in the folder has done all iterations; None where something is left.

    Also a run that has done them all leaves something to do where its parameters are missing.
    """
    with suppress(CheckpointError, DocumentError, TensorError, OSError):
        if not all_done(folder, resume, iterations):
            return None
        layers = range(len(resume.manifest.layers))
        schedule = read(folder / "schedule.json")
        digests = {name: tensor_digest(name, tensor) for layer in layers
                   for name, tensor in _named(layer, folder).items()}
        return {"iterations": 0, "losses": [], "parameter_digest": combined_digest(digests),
                "first_iteration": resume.iteration, "recoveries": [], "slow_workers": [],
                "measured_period": None, "planned_period": schedule.seconds(schedule.period_ticks)}
    return None


def _named(layer: int, folder: Path) -> dict[str, Tensor]:
    return {f"{layer}.{name}": tensor for name, tensor in load_layer(folder, layer).items()}
