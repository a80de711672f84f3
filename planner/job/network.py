"""Read the `[network]` table of a job file: links, and overlap of reductions with compute."""

from collections.abc import Sequence

import msgspec

from slipstream.planner.job.toml import JobError, TomlTable, shorten_repr


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the `[network]` table of a job file; all links are alike."""

    overlap: bool = False
    """True if gradient reductions run while the worker computes."""
    latency: float = 0.0
    """Seconds that any message takes from one worker to another, whatever its size."""
    bandwidth: float | None = None
    """Bytes per second of a link, in each direction. None if times are those of `[time]`."""
    gradients: tuple[float, ...] = ()
    """Bytes of each virtual stage's gradients. With `bandwidth`, they decide reduction times."""
    slowdown: float = 0.0
    """Delay of compute by an overlapping reduction, as a share of the reduction's time.

    The two compete for memory and cores.
    """
    activation: float | None = None
    """Bytes that one stage sends to the next. With `bandwidth`, they decide transfer times."""

    def reduction_latency(self, holders: int) -> float:
        """Return the seconds of a gradient reduction that do not depend on its size.

        Messages pass twice around a ring of holders (Patarasuk and Yuan, J. Parallel Distrib.
        Comput. 69, 2009).
        """
        return 2 * (holders - 1) * self.latency

    def reduction_seconds(self, size: float, holders: int) -> float:
        """Return the seconds of a ring all-reduce of `size` bytes among `holders` workers.

        Each of n holders sends 2 (n - 1) / n times these bytes. The result is rounded to four
        digits. `bandwidth` must not be None.
        """
        assert self.bandwidth is not None
        return round_to_four_digits(
            self.reduction_latency(holders) + 2 * (holders - 1) / holders * size / self.bandwidth
        )

    def transfer_seconds(self) -> float:
        """Return the seconds that an activation takes from one worker to another.

        The result is rounded to four digits. `bandwidth` and `activation` must not be None.
        """
        assert self.bandwidth is not None and self.activation is not None
        return round_to_four_digits(self.latency + self.activation / self.bandwidth)


def read_network(
    table: TomlTable, virtual: int, chains: int, per: str, measured: Sequence[str]
) -> Network:
    """Read a `[network]` table.

    There are `virtual` virtual stages in each of `chains` directions of micro-batches. `per` is the
    word for a stage in messages. `measured` has the keys that are given in `[time]`: such a time
    must not follow from bytes and bandwidth, too. Raises JobError if one does, or for a value that
    is not as expected.
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
    # A reduction that delays compute by all of its time would not overlap it.
    if network.slowdown >= 1:
        raise JobError(f"network.slowdown is {network.slowdown:g}; expected a share, less than 1")
    # A time is either measured or computed from sizes; both would contradict each other.
    for key, given, time in (
        ("gradients", network.gradients, "all_reduce"),
        ("activation", network.activation is not None, "transfer"),
    ):
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
    """Return the contents of a job file's `[network]` table, from measured values.

    `latency`, `bandwidth` and `slowdown` are in the units of `Network`. Whether reductions overlap
    is taken from `network`. So is the latency if `bandwidth` is 0: then no links were measured.
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
    """Return a value rounded to four significant digits. It then needs no very fine ticks."""
    return float(f"{seconds:.4g}")
