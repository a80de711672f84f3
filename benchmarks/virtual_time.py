"""Play many runs in virtual time, and require one process's numbers.

    python -m benchmarks.virtual_time --seeds 1000:1060 [--suite deaths|edges|flips]
                                      [--config NAME] [--case NAME]

The coordinator, the workers and their steps are the real ones. Messages, files and the clock are
scripted (`tests/runtime/exact`), so that a seed decides what happens when. Suites:

- `deaths`: workers and node 0 die at any moment, and come back.
- `edges`: links that never work (`apart`), receivers that take nothing (`slow`), losses that are
  not finite (`exponent`).
- `flips`: a bit flips in what one worker holds; node 0 dies now and then.

Slow tests play a few of these seeds. The benchmark plays all that are asked, over both scripted
transports, and does not stop at the first that is wrong: it prints a line with which that run can
be repeated. The exit status is 1 if there is any.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch

from slipstream.runtime.moving import layer_sender
from tests.runtime.exact import test_edges, test_exact, test_flipped_bits
from tests.runtime.exact.fibers import patched
from tests.runtime.exact.world import ExactWorld

Play = Callable[[int, Path, bool], ExactWorld]
"""Function that plays a seed's run in a folder, over a double of a transport."""


def _play_deaths(name: str, seed: int, folder: Path, nccl: bool) -> ExactWorld:
    return test_exact.play(seed, name, folder, nccl=nccl)


def _play_edge(name: str, edge: str, seed: int, folder: Path, nccl: bool) -> ExactWorld:
    return test_edges.play(test_edges.build_world(seed, folder, name, edge, nccl=nccl))


def _play_flip(name: str, what: str, seed: int, folder: Path, nccl: bool) -> ExactWorld:
    return test_flipped_bits.play(seed, name, what, folder, nccl=nccl)


def list_plays() -> Iterator[tuple[str, str, str, Play]]:
    """Yield each kind of run: suite, configuration, case, and what plays it."""
    for name in test_exact.CONFIGS:
        yield "deaths", name, "", partial(_play_deaths, name)
    for name in test_exact.CONFIGS:
        for edge in test_edges.EDGES:
            yield "edges", name, edge, partial(_play_edge, name, edge)
    for name, what in test_flipped_bits.FLIPS:
        yield "flips", name, what, partial(_play_flip, name, what)


def parse_seeds(text: str) -> range:
    """Return the seeds that an option A:B names."""
    first, end = map(int, text.split(":"))
    return range(first, end)


def main() -> int:
    """Play the runs, print kinds and wrong runs, and return the exit status."""
    plays = list(list_plays())
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=parse_seeds, required=True, metavar="A:B")
    for number, option in enumerate(("suite", "config", "case")):
        parser.add_argument(f"--{option}", choices=sorted({play[number] for play in plays} - {""}))
    options = parser.parse_args()
    asked = options.suite, options.config, options.case
    torch.set_num_threads(1)
    layer_sender.ROOM_SECONDS = test_edges.ROOM_SECONDS
    wrong = 0
    for *kind, play in plays:
        if all(choice in (None, part) for choice, part in zip(asked, kind, strict=True)):
            wrong += _play_seeds(" ".join(filter(None, kind)), play, options.seeds)
    print(f"{wrong} runs were wrong" if wrong else "all runs had the numbers of one process")
    return 1 if wrong else 0


def _play_seeds(kind: str, play: Play, seeds: range) -> int:
    """Play one kind of run for all seeds, and return how many were wrong.

    Each seed plays over both transports.
    """
    began, wrong, seen = time.process_time(), 0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder, patched():
        for seed, nccl in product(seeds, (False, True)):
            try:
                world = play(seed, Path(folder), nccl)
            except Exception as error:  # whatever it is, the other runs are played
                wrong += 1
                transport = "NCCL" if nccl else "gloo"
                print(f"WRONG: {kind}, seed {seed}, {transport}: {error!r}", flush=True)
            else:
                seen.update(
                    runs=1, deaths=world.deaths, restarts=world.restarts, returns=world.went_back
                )
    print(
        f"{kind}: {seen['runs']} runs, {seen['deaths']} workers and {seen['restarts']} times node "
        f"0 died, {seen['returns']} times back to a checkpoint, {wrong} wrong; "
        f"{time.process_time() - began:.0f} s",
        flush=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
