"""End the program with one line and an exit status when a run cannot begin, fails or is interrupted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from slipstream.cli.shared.console import err, exit_negative, refuse
from slipstream.planner.job.file import JobError
from slipstream.planner.model.problem import NoPlanError
from slipstream.runtime.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.config import ConfigError
from slipstream.runtime.errors import RunError
from slipstream.runtime.events import LOSSES
from slipstream.runtime.placement import PlacementError
from slipstream.runtime.processes.stop_signals import RunStopped
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.run_folder import FolderError
from slipstream.schedules.codec import ScheduleError


@contextmanager
def exit_on_errors(goes_on: Callable[[], str] = str, folder: Path | None = None) -> Iterator[None]:
    """Turn an error within the context into one line on stderr and an exit status: 2 if a run cannot begin, 1 if it
    fails, 130 or 143 if it is interrupted.

    For a run that had begun, the line says how many losses its `folder` has, if it is given, and ends with the result
    of `goes_on`: a clause that says how to resume it.
    """
    try:
        yield
    except (JobError, ConfigError, PlacementError, RendezvousError, CheckpointError, FolderError,
            ScheduleError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or '--out'}: cannot be used: {error.strerror}")
    except (RunError, NoPlanError) as error:
        exit_negative(f"{error}{goes_on()}")
    except RunStopped as stopped:
        err.print(f"slipstream: {stopped}; all workers are gone{_describe_losses(folder)}{goes_on()}",
                  style="yellow", soft_wrap=True)
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        err.print(f"slipstream: interrupted; all workers are gone{_describe_losses(folder)}", style="yellow",
                  soft_wrap=True)
        raise typer.Exit(130) from None


def _describe_losses(folder: Path | None) -> str:
    """Return a clause on how many losses the file in a run's folder has: none if the disk was full. Empty for None."""
    if folder is None:
        return ""
    count = 0
    with suppress(OSError):
        count = (folder / LOSSES).read_bytes().count(b"\n")
    return f", and {folder / LOSSES} has the losses of {count or 'no'} iteration{'s' * (count != 1)}"
