"""Megatron Core reads and validates our layouts.

`make neighbours` installs it.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from pathlib import Path

import pytest

from slipstream.cli.exporters import ExportError
from slipstream.cli.exporters.megatron import MegatronSettings, build_settings
from slipstream.planner.job.megatron import read_layout
from slipstream.schedules.layers import prefix_sums
from slipstream.schedules.schedule import Grid, VirtualStage
from tests.planner.job.test_megatron import RECIPES

TIMEOUT_SECONDS = 300
FOLDER = Path(__file__).parents[2] / "out" / "neighbours" / "megatron-core"
"""Where `make neighbours` puts it, without what it depends on."""
READ = """
import json, sys
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
answers = []
for settings in json.load(sys.stdin):
    layout = PipelineParallelLayerLayout(settings["pipeline_model_parallel_layout"],
                                         settings["pipeline_model_parallel_size"])
    layout.validate_layer_layout(settings["num_layers"], settings["mtp_num_layers"])
    chunks = layout.virtual_pipeline_model_parallel_size
    answers.append(["".join(letters[layer.name] for layer in rank[chunk]) for chunk in range(chunks)
                    for rank in layout.layout])
json.dump(answers, sys.stdout)
"""


def grid_of(counts: Sequence[int], ranks: int) -> Grid:
    """A grid whose stages have these numbers of layers, assigned to ranks in turn."""
    edges = prefix_sums(counts)
    return Grid(
        pipelines=1,
        columns=ranks,
        microbatches=(4 * ranks,),
        stages=tuple(
            VirtualStage(column=stage % ranks, layers=layers)
            for stage, layers in enumerate(pairwise(edges))
        ),
    )


def drawn_settings(rng: random.Random) -> Iterator[tuple[tuple[int, ...], MegatronSettings]]:
    """Numbers of letters of each stage, and the settings; without end."""
    while True:
        ranks, chunks = rng.randint(2, 6), rng.randint(1, 4)
        counts = [rng.choice([0, 1, 2, 2, 3, 5]) for _ in range(ranks * chunks)]
        counts[1:-1] = sorted(counts[1:-1])  # equal ones next to each other
        more = rng.choice([0, 2, 3, 4])  # layers that are not decoders: embedding, head, prediction
        if sum(counts) - more < 1:
            continue
        with suppress(ExportError):  # prediction in several stages, or no embedding in the first
            settings = build_settings(grid_of(counts, ranks), sum(counts) - more)
            if not more:
                counts[0], counts[-1] = counts[0] + 1, counts[-1] + 1
            yield tuple(counts), settings


@pytest.mark.slow
@pytest.mark.skipif(
    not FOLDER.is_dir() and importlib.util.find_spec("megatron") is None,
    reason="megatron-core is not installed: make neighbours",
)
def test_megatron_core_reads_the_stages_of_our_layouts():
    """Layouts of recipes and 300 drawn ones are read.

    Embedding and head are layers or not, and some predict further tokens.
    """
    cases = list(islice(drawn_settings(random.Random(0)), 300))
    for layout, ranks in zip(RECIPES, (2, 8, 16, 4, 4, 2), strict=True):
        stages = read_layout("layout", layout)
        counts = tuple(map(len, stages))
        cases.append((counts, build_settings(grid_of(counts, ranks), "".join(stages).count("t"))))
    sent = json.dumps([settings._asdict() for _, settings in cases])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(FOLDER)])}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=sent,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    for (counts, settings), stages in zip(cases, json.loads(done.stdout), strict=True):
        assert tuple(map(len, stages)) == counts
        assert tuple(stages) == read_layout("layout", settings.pipeline_model_parallel_layout)
    assert {settings.mtp_num_layers for _, settings in cases} == {0, 1, 2}
