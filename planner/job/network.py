"""Read the `[network]` table of a job file.

It has the links between workers, and whether reductions overlap with compute.
"""

from collections.abc import Sequence

import msgspec

from slipstream.planner.job.toml import JobError, TomlTable, shorten_repr


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the `[network]` table.

    The links of the workers, all alike, one in each direction.
    """

    overlap: bool = False
    """True if gradient reductions run while the worker computes."""
    latency: float = 0.0
    """Seconds from one worker to another, independent of the size of a message."""
    bandwidth: float | None = None
    """Bandwidth of a link, in bytes per second.

    None if the times of reductions and transfers are those of `[time]`.
    """
    gradients: tuple[float, ...] = ()
    """Bytes of a stage's gradients, by virtual stage.

    With `bandwidth`, they decide the times of reductions.
    """
    slowdown: float = 0.0
    """Delay of compute by a reduction that overlaps it.

    It is a share of the reduction's time: they share memory and cores.
    """
    activation: float | None = None
    """Bytes of the activation that one stage sends to the next.

    With `bandwidth`, it decides the time of transfers.
    """

    def reduction_latency(self, holders: int) -> float:
        """Return the seconds of a gradient reduction that do not depend on its size.

        Messages pass twice around a ring of holders (Patarasuk and Yuan, J. Parallel Distrib.
        Comput. 69, 2009).
        """
        return 2 * (holders - 1) * self.latency

    def reduction_seconds(self, size: float, holders: int) -> float:
        """Return the seconds of a ring all-reduce of `size` bytes among n holders.

        Each sends 2 (n - 1) / n of them.
        """
        assert self.bandwidth is not None
        return round_to_four_digits(
            self.reduction_latency(holders) + 2 * (holders - 1) / holders * size / self.bandwidth
        )

    def transfer_seconds(self) -> float:
        """Return the seconds that an activation takes from one worker to another."""
        assert self.bandwidth is not None and self.activation is not None
        return round_to_four_digits(self.latency + self.activation / self.bandwidth)


def read_network(
    table: TomlTable, virtual: int, chains: int, per: str, measured: Sequence[str]
) -> Network:
    """Read a `[network]` table. Raises JobError.

    There are `virtual` virtual stages in each of `chains` directions of micro-batches; `per` is the
    word for a stage in messages. The argument `measured` has the keys given in `[time]`: a time
    that is given there must not follow from bytes and bandwidth, too.
    """
    overlap = table.take_value("overlap", False)
    if not isinstance(overlap, bool):
        raise JobError(f"network.overlap is {shorten_repr(overlap)}; expected true or false")
    bandwidth = table.take_number("bandwidth") if table.has_optional("bandwidth") else None
    if bandwidth == 0:
        raise JobError("network.bandwidth is 0; expected bytes a second, more than 0")
    network = Network(
        overlap=overlap,
        bandwidth=bandwidth,
        latency=table.take_number("latency", 0.0),
        gradients=table.take_numbers("gradients", virtual, per) * chains
        if table.has_optional("gradients")
        else (),
        slowdown=table.take_number("slowdown", 0.0),
        activation=table.take_number("activation") if table.has_optional("activation") else None,
    )
    table.refuse_unknown_keys()
    if network.slowdown >= 1:
        raise JobError(f"network.slowdown is {network.slowdown:g}; expected a share, less than 1")
    for key, given, time in (("gradients", network.gradients, "all_reduce"),
                             ("activation", network.activation is not None, "transfer")):
        if given and bandwidth is None:
            raise JobError(
                f"network.{key} is given without network.bandwidth; expected both, which give the "
                "time"
            )
        if given and time in measured:
            raise JobError(
                f"network.{key} and time.{time} are both given; expected one of them: what was "
                "measured, or what follows from bytes and bandwidth"
            )
    return network


def network_table(
    network: Network, latency: float, bandwidth: float, slowdown: float
) -> dict[str, bool | float]:
    """Return the contents of a job file's `[network]` table.

    They follow from measured latency, bandwidth and slowdown of compute. The units are those of
    `Network`. A `bandwidth` of 0 means that no links were measured: the latency of `network` is
    kept.
    """
    table: dict[str, bool | float] = {"overlap": True} if network.overlap else {}
    if not bandwidth:
        return {**table, **({"latency": network.latency} if network.latency else {})}
    return {
        **table,
        "latency": round_to_four_digits(latency),
        "bandwidth": round_to_four_digits(bandwidth),
        "slowdown": round_to_four_digits(slowdown),
    }


def round_to_four_digits(seconds: float) -> float:
    """Return a number of seconds (or other units) rounded to four digits.

    So ticks stay coarse.
    """
    return float(f"{seconds:.4g}")
