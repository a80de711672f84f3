"""Data of all pipelines, as one of torchtitan's data loaders."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader

Batch = tuple[dict[str, Tensor], Tensor]


class PipelinesLoader(BaseDataLoader):
    """The micro-batches of an iteration of all pipelines in turn, and then those of the next.

    Each pipeline's are those that it would read in torchtitan, as one of its replicas. Every process
    reads all of them: so it can run those of any pipeline once another worker has died.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """What to read."""

        one: BaseDataLoader.Config = field(default_factory=BaseDataLoader.Config)
        """Configuration of the data loader of one pipeline."""
        pipelines: tuple[int, ...] = ()
        """Pipeline of each micro-batch of an iteration."""

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **others: Any) -> None:
        self._order = config.pipelines
        count = 1 + max(config.pipelines)
        self._loaders = [config.one.build(dp_world_size=count * dp_world_size,
                                          dp_rank=pipeline * dp_world_size + dp_rank, **others)
                         for pipeline in range(count)]

    def __iter__(self) -> Iterator[Batch]:
        """Return all micro-batches, until one pipeline has no more."""
        readers = [iter(loader) for loader in self._loaders]
        while True:
            for pipeline in self._order:
                batch = next(readers[pipeline], None)
                if batch is None:
                    return
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return where each pipeline's data loader is."""
        return {f"pipeline {pipeline}": loader.state_dict() for pipeline, loader in enumerate(self._loaders)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to where `state_dict` was."""
        for pipeline, loader in enumerate(self._loaders):
            loader.load_state_dict(state_dict[f"pipeline {pipeline}"])
