"""What carries tensors between workers: gloo, over host memory, or NCCL, from card to card."""

from typing import Literal

from slipstream.runtime.config import ConfigError

Transport = Literal["gloo", "nccl"]


def choose_transport(wanted: str, device: str, workers: int, cards: int) -> Transport:
    """NCCL where each of a machine's workers computes on a card of its own, else gloo.

    Raises ConfigError when NCCL is asked for where it cannot work: it refuses two workers on one card.
    """
    able = device == "cuda" and workers <= cards
    if wanted == "nccl" and not able:
        raise ConfigError(f"training.backend is 'nccl', which needs a GPU for each worker; here are {cards} for "
                         f"{workers} workers")
    return "nccl" if able and wanted != "gloo" else "gloo"
