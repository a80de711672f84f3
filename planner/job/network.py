"""The `[network]` table of a job file: the links between workers, and whether reductions go on beside compute."""

from collections.abc import Sequence

import msgspec

from slipstream.planner.job.toml import JobError, TomlTable, shortened


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Links of workers, all alike, one each way."""

    overlap: bool = False
    """Whether reductions occupy links, and not compute."""
    latency: float = 0.0
    """Seconds from one worker to another, however little is sent."""
    bandwidth: float | None = None
    """Bytes a second."""
    gradients: tuple[float, ...] = ()
    """Bytes of a stage's gradients, by virtual stage; with a bandwidth, what reductions take follows from them."""
    slowdown: float = 0.0
    """Share of the time of a reduction in which compute beside it stands still: memory and cores are shared."""
    activation: float | None = None
    """Bytes of an activation: the same of transfers."""

    def least(self, holders: int) -> float:
        """Seconds that a reduction takes however little it reduces: a ring of so many goes round twice (Patarasuk and
        Yuan, J. Parallel Distrib. Comput. 69, 2009)."""
        return 2 * (holders - 1) * self.latency

    def all_reduce(self, size: float, holders: int) -> float:
        """Seconds for so many bytes, each worker of a ring sending 2 (n - 1) / n of them."""
        assert self.bandwidth is not None
        return rounded(self.least(holders) + 2 * (holders - 1) / holders * size / self.bandwidth)

    def transfer(self) -> float:
        """Seconds for an activation."""
        assert self.bandwidth is not None and self.activation is not None
        return rounded(self.latency + self.activation / self.bandwidth)


def read_network(table: TomlTable, virtual: int, chains: int, per: str, measured: Sequence[str]) -> Network:
    """`measured`: the keys of `[time]`. Raises JobError."""
    overlap = table.take("overlap", False)
    if not isinstance(overlap, bool):
        raise JobError(f"network.overlap is {shortened(overlap)}; expected true or false")
    bandwidth = table.number("bandwidth") if table.known("bandwidth") else None
    if bandwidth == 0:
        raise JobError("network.bandwidth is 0; expected bytes a second, more than 0")
    found = Network(overlap=overlap, bandwidth=bandwidth, latency=table.number("latency", 0.0),
                    gradients=table.numbers("gradients", virtual, per) * chains if table.known("gradients") else (),
                    slowdown=table.number("slowdown", 0.0),
                    activation=table.number("activation") if table.known("activation") else None)
    table.finish()
    if found.slowdown >= 1:
        raise JobError(f"network.slowdown is {found.slowdown:g}; expected a share, less than 1")
    for key, given, time in (("gradients", found.gradients, "all_reduce"),
                             ("activation", found.activation is not None, "transfer")):
        if given and bandwidth is None:
            raise JobError(f"network.{key} is given without network.bandwidth: what they take together is not known")
        if given and time in measured:
            raise JobError(f"network.{key} and time.{time} are both given; expected one of them: what was measured, or "
                           "what follows from bytes and bandwidth")
    return found


def network_table(network: Network, latency: float, bandwidth: float, slowdown: float) -> dict[str, bool | float]:
    """The `[network]` table where these have been measured (`bandwidth` 0: nothing has), reductions and transfers, too.
    """
    kept: dict[str, bool | float] = {"overlap": True} if network.overlap else {}
    if not bandwidth:
        return {**kept, **({"latency": network.latency} if network.latency else {})}
    return {**kept, "latency": rounded(latency), "bandwidth": rounded(bandwidth), "slowdown": rounded(slowdown)}


def rounded(seconds: float) -> float:
    """To four digits, so that ticks stay coarse."""
    return float(f"{seconds:.4g}")
