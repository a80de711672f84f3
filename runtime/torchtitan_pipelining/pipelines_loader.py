"""Read the data of all pipelines through one data loader, in torchtitan's form."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

Batch = tuple[dict[str, Tensor], Tensor]


class PipelinesLoader(BaseDataLoader):
    """Data loader of the micro-batches of all pipelines, iteration by iteration.

    A pipeline has the micro-batches that the replica of its number would read in torchtitan. Every
    process reads those of all pipelines, so that it can run any of them once another worker has
    died.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Configuration: the data of one pipeline, and which pipeline has each micro-batch."""

        one: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        """Configuration of the data loader of one pipeline."""
        pipelines: tuple[int, ...] = ()
        """Pipeline of each micro-batch of an iteration."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others: Any) -> None:
        self._order = config.pipelines
        count = 1 + max(config.pipelines)
        # To each loader, pipelines look like torchtitan's replicas: they have consecutive ranks.
        self._loaders = [
            config.one.build(
                dp_world_size=count * dp_world_size,
                dp_rank=pipeline * dp_world_size + dp_rank,
                **others,
            )
            for pipeline in range(count)
        ]

    def __iter__(self) -> Iterator[Batch]:
        """Yield all micro-batches, until a pipeline has no more."""
        readers = [iter(loader) for loader in self._loaders]
        while True:
            for pipeline in self._order:
                batch = next(readers[pipeline], None)
                if batch is None:
                    return
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each pipeline's data loader."""
        return {
            f"pipeline {pipeline}": loader.state_dict()
            for pipeline, loader in enumerate(self._loaders)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to the position in the data that `state_dict` returned."""
        for pipeline, loader in enumerate(self._loaders):
            loader.load_state_dict(state_dict[f"pipeline {pipeline}"])
