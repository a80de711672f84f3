"""Data that write down the numbers of the samples that are read."""

import os
from pathlib import Path

import numpy as np

from slipstream.runtime.api import Microbatch, RunConfig
from slipstream.runtime.data.token_data import TokenData
from slipstream.runtime.replay.microbatch import NOTHING_READ, SamplesRead

FOLDER = "COUNTED_DATA_FOLDER"


class Uncounted:
    """Tokens whose place in an epoch says which sample they are.

    They are read as the job has micro-batches.
    """

    digest = "counted"

    def __init__(self, config: RunConfig) -> None:
        self.context, self.microbatches = (
            config.model.context,
            config.training.options["microbatches"],
        )
        self.count_from(NOTHING_READ)

    def count_from(self, read: SamplesRead) -> None:
        self.data = TokenData(
            "counted",
            np.arange(256, dtype=np.uint8),
            vocabulary=256,
            context=self.context,
            microbatches=self.microbatches,
            seed=0,
            shuffle=False,
            read=read,
        )

    def batch(self, microbatch: Microbatch, batch: int, context: int):
        found = self.data.batch(microbatch, batch, context)
        name = "-".join(map(str, (*microbatch, *(found[0][:, 0] // context).tolist())))
        (Path(os.environ[FOLDER]) / name).touch()
        return found


class Counted(Uncounted):
    """The same, which also count on from what others have read."""

    def begin_at(self, iteration: int, samples: int) -> None:
        self.count_from(SamplesRead(iteration, samples))
