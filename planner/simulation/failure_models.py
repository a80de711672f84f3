"""Failure models: published rates, causes and durations of failures, each with its source.

A model is a list of kinds of failures. A kind takes a *domain* down at once: one GPU, a server of
8, all machines on one switch, a rack, a power feed. Rates and causes are published; the time that a
machine is away seldom is. If a figure is our assumption, its source says so.

A model may have a published curve of mean times to failure (MTTF) by size of the job, to which all
its rates are then scaled.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

GPUS_PER_SERVER = 8
"""Number of GPUs of a server, in all of these clusters unless stated otherwise."""
UNICRON_TRANSIENT = 0.73
"""Share of failures that a restart mends. Unicron (arXiv 2401.00134), section 2."""


class FailureKind(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of failures: how many GPUs fail at once, how often, and how long."""

    cause: str
    gpus: int = 1
    """Number of neighbouring GPUs that a failure takes down at once: its domain."""
    mtbf_hours: float
    """Mean hours between failures of one domain of `gpus` GPUs."""
    transient_share: float = UNICRON_TRANSIENT
    """Share of failures after which a restart brings the machines back."""
    restart_hours: float = 0.1
    """Mean hours of a restart after a transient failure; assumed unless given."""
    repair_hours: float = 4.0
    """Mean hours of repair or replacement after other failures; assumed unless given."""
    repair_median_hours: float | None = None
    """Median hours of a repair, if repairs are distributed log-normally; None: exponentially."""
    source: str = "given by the user"


class FailureModel(msgspec.Struct, frozen=True, kw_only=True):
    """Rates, causes and repair times of failures, which take whole domains of GPUs down."""

    name: str
    kinds: tuple[FailureKind, ...]
    source: str = "given by the user"
    mttf_hours: tuple[tuple[int, float], ...] = ()
    """Published curve: pairs (GPUs of a job, mean hours to its next failure), ascending."""
    repairs_at_once: int | None = None
    """Largest number of domains repaired at a time, in order of failure. None: no limit."""
    # The smaller the shape, the larger the share of all failures that the same few domains have.
    rate_shape: float | None = None
    """Shape of the gamma distribution of domains' failure rates. None: equal rates."""
    period_days: float | None = None
    """Days after which a new factor on all failure rates is drawn. None: no factor."""
    period_shape: float = 1.0
    """Shape of the gamma distribution of periods' factors, of mean 1; small: few are large."""

    def mean_hours_to_failure(self, gpus: int) -> float:
        """Return the mean hours between failures of any kind in this number of GPUs."""
        if self.mttf_hours:
            return interpolate_mttf(self.mttf_hours, gpus)
        return 1.0 / sum(-(-gpus // kind.gpus) / kind.mtbf_hours for kind in self.kinds)

    def scale_kinds(self, gpus: int) -> tuple[FailureKind, ...]:
        """Return the kinds of failures, with their rates for a job of this many GPUs.

        The rates follow the curve `mttf_hours`; without a curve, the kinds are unchanged.
        """
        if not self.mttf_hours:
            return self.kinds
        factor = self.mean_hours_to_failure(gpus) * sum(
            -(-gpus // kind.gpus) / kind.mtbf_hours for kind in self.kinds
        )
        return tuple(
            msgspec.structs.replace(kind, mtbf_hours=kind.mtbf_hours * factor)
            for kind in self.kinds
        )


def interpolate_mttf(points: Sequence[tuple[int, float]], gpus: int) -> float:
    """Return the mean time to failure in hours of a job with this many GPUs.

    Between the published `points`, pairs (GPUs, hours), the logarithm of the time is linear in that
    of the GPUs. Outside them, the rate per GPU is that of the nearest point.
    """
    sizes = [size for size, _ in points]
    nearest = min(max(gpus, sizes[0]), sizes[-1])
    logarithm = float(
        np.interp(math.log(nearest), np.log(sizes), np.log([hours for _, hours in points]))
    )
    return math.exp(logarithm) * nearest / gpus


def make_single_gpu_model(
    mtbf_hours: float, source: str = "given by the user", *, name: str = "given"
) -> FailureModel:
    """Return a model in which single GPUs fail, every `mtbf_hours` on average.

    The text `source` says where that number is from. All else has the defaults of `FailureKind`.
    """
    return FailureModel(
        name=name,
        source=source,
        kinds=(FailureKind(cause="any", mtbf_hours=mtbf_hours, source=source),),
    )


# --- Llama 3 --------------------------------------------------------------------------------------

LLAMA_3_GPUS = 16_384
LLAMA_3_HOURS = 54 * 24.0
"""Number of hours in which the interruptions of Llama 3's training were counted."""
GPUS_PER_SWITCH = 16
"""Number of GPUs on one switch: a rack of two servers (Llama 3, section 3.3.1)."""
# (cause, interruptions in 54 days, GPUs of the domain, True if a restart is mostly enough)
_LLAMA_3 = (
    ("faulty GPU", 148, 1, False),
    ("GPU memory (HBM3)", 72, 1, False),
    ("software bug", 54, 1, True),
    ("network switch or cable", 35, GPUS_PER_SWITCH, False),
    ("unplanned host maintenance", 32, GPUS_PER_SERVER, False),
    ("GPU SRAM", 19, 1, False),
    ("GPU system processor", 17, 1, False),
    ("network card", 7, 1, False),
    ("NCCL watchdog timeout", 7, 1, True),
    ("silent data corruption", 6, 1, False),
    ("GPU thermal interface, sensor", 6, 1, False),
    ("SSD", 3, GPUS_PER_SERVER, False),
    ("power supply", 3, GPUS_PER_SERVER, False),
    ("server chassis", 2, GPUS_PER_SERVER, False),
    ("IO expansion board", 2, GPUS_PER_SERVER, False),
    ("dependency", 2, 1, True),
    ("CPU", 2, GPUS_PER_SERVER, False),
    ("system memory", 2, GPUS_PER_SERVER, False),
)
LLAMA_3_SOURCE = (
    "Llama 3 (Meta 2024, arXiv 2407.21783), section 3.3.4, table 5: 419 unexpected interruptions "
    "by cause, 16,384 H100, 54 days"
)


def _build_llama_3() -> FailureModel:
    kinds = []
    for cause, count, gpus, restarts in _LLAMA_3:
        domains = LLAMA_3_GPUS / gpus
        of_switch, ending = "", "; transient share of Unicron, repair times assumed"
        # Say in the source where the published table leaves the domain open.
        if gpus == GPUS_PER_SWITCH:
            of_switch = (
                " (a rack and its switch, section 3.3.1; the table does not part switches from "
                "cables)"
            )
        if restarts:
            ending = "; a restart is taken to be enough"
        domain = f"domain {gpus} GPU{'s' * (gpus > 1)}"
        kinds.append(
            FailureKind(
                cause=cause,
                gpus=gpus,
                mtbf_hours=domains * LLAMA_3_HOURS / count,
                transient_share=1.0 if restarts else UNICRON_TRANSIENT,
                source=f"{LLAMA_3_SOURCE}: {count}; {domain}{of_switch}{ending}",
            )
        )
    return FailureModel(
        name="llama-3",
        kinds=tuple(kinds),
        source=LLAMA_3_SOURCE
        + (
            ": one in 3.1 h; transient shares of Unicron (73 %), software restarts only; repair "
            "times assumed"
        ),
    )


# --- Meta's research clusters ---------------------------------------------------------------------

RSC = "Meta Research SuperCluster (Kokolis et al., HPCA 2025, arXiv 2410.21680)"
RSC_1 = 6.50
"""Failures per 1,000 node-days of RSC-1, whose nodes have 8 A100 (section III, figure 7)."""
RSC_2 = 2.34
"""Failures per 1,000 node-days of RSC-2 (section III, figure 7)."""
RSC_MTTF = ((1_024, 7.9), (16_384, 1.8), (131_072, 0.23))
"""Pairs (GPUs, MTTF in hours), projected beyond 1,024 (section III, figure 7)."""


def _build_meta_rsc(
    name: str, rate: float, curve: tuple[tuple[int, float], ...], source: str
) -> FailureModel:
    # The published rate is of whole nodes; that a quarter of it takes all GPUs is our assumption.
    parts = (("a GPU or its link", 1, 0.75), ("a server", GPUS_PER_SERVER, 0.25))
    kinds = (
        FailureKind(
            cause=cause,
            gpus=gpus,
            mtbf_hours=24_000 / (share * rate) * GPUS_PER_SERVER / gpus,
            source=(
                f"{source}; {share:.0%} of them taken to be of {cause} (our split); transient "
                "share of Unicron, repair times assumed"
            ),
        )
        for cause, gpus, share in parts
    )
    return FailureModel(
        name=name,
        kinds=tuple(kinds),
        mttf_hours=curve,
        source=f"{source}; a quarter of them taken to "
        "be of whole servers, 73 % transient (Unicron), repair times assumed",
    )


# --- InfiniteHBD ----------------------------------------------------------------------------------

INFINITE_HBD = (
    "InfiniteHBD (Shou et al., SIGCOMM 2025, arXiv 2502.03885), InfiniteHBD-Trace: 584 faults of "
    "400 servers in 349 days"
)
INFINITE_HBD_DAYS = 348.98
# (cause, faults, share back within 4 h, their mean, mean and median hours of all others)
_INFINITE_HBD = (
    ("hardware or software", 322, 0.295, 0.81, 252.5, 62.3),
    ("unknown error, stress test, change", 262, 0.363, 1.44, 120.0, 42.1),
)
# A server has 1.46 faults on average, with a variance of 3.75; 169 of 400 have none.
INFINITE_HBD_SHAPE = 0.93
"""Shape of the gamma distribution of the servers' failure rates, fitted by moments."""
INFINITE_HBD_PERIOD_DAYS = 30.0
"""Length in days of the periods with a common factor on all failure rates."""
# In 30 days servers fail 48.6 times on average, with a variance of 14.9 times that.
INFINITE_HBD_PERIOD_SHAPE = 3.5
"""Shape of the gamma distribution of the periods' factors, fitted by moments."""


def _build_infinite_hbd() -> FailureModel:
    kinds = tuple(
        FailureKind(
            cause=cause,
            gpus=GPUS_PER_SERVER,
            mtbf_hours=400 * INFINITE_HBD_DAYS * 24 / count,
            transient_share=share,
            restart_hours=short,
            repair_hours=mean,
            repair_median_hours=median,
            source=(
                f"{INFINITE_HBD}, {count} of them; {share:.1%} back within 4 h, in {short:g} h on "
                "average, the others in "
                f"{mean:g} h, {median:g} h in the median; servers taken to be of 8 GPUs"
            ),
        )
        for cause, count, share, short, mean, median in _INFINITE_HBD
    )
    # Servers differ by more than chance, and so do months: both have rates of their own.
    return FailureModel(
        name="infinite-hbd",
        kinds=kinds,
        rate_shape=INFINITE_HBD_SHAPE,
        period_days=INFINITE_HBD_PERIOD_DAYS,
        period_shape=INFINITE_HBD_PERIOD_SHAPE,
        source=(
            f"{INFINITE_HBD}; times out of service by two kinds of causes, log-normal beyond 4 h; "
            "servers' rates differ as "
            "their numbers of faults do, and those of months; all fitted here"
        ),
    )


# --- Others ---------------------------------------------------------------------------------------

DELTA = (
    "Delta (Cui et al., SC 2025, arXiv 2503.11901 v4), section 4: errors of 608 H100 (2.1 million "
    "GPU-hours) and of 448 A100 (9.6 million)"
)
_DELTA_H100 = (
    ("memory management unit", 1_737 / 2.1e6, True),
    ("uncorrectable memory", 1 / 88_768, False),
    ("GPU system processor", 3 / 2.1e6, False),
)
_DELTA_A100 = (
    ("memory management unit", 8_863 / 9.6e6, True),
    ("GPU system processor", 3_857 / 9.6e6, False),
    ("NVLink", 1_922 / 9.6e6, True),
    ("power management unit", 77 / 9.6e6, False),
    ("uncorrectable memory", 1 / 283_271, False),
)
"""GPU errors in the Delta cluster: (cause, per GPU-hour, True if only the process ends)."""
FT_HSDP_GPUS = 100_000
FT_HSDP_HOURS = 18 / 60
"""Mean hours between failures of FT-HSDP's job."""
FT_HSDP = (
    "FT-HSDP (Salpekar et al., arXiv 2602.00277), abstract: 44 % effective training time with 10 "
    "minutes lost at each failure, 100,000 GPUs: one in 18 minutes"
)


def _build_delta(name: str, errors: tuple[tuple[str, float, bool], ...]) -> FailureModel:
    kinds = []
    for cause, rate, ends_process in errors:
        source = f"{DELTA}; every error taken to end the job's step"
        share = UNICRON_TRANSIENT
        if ends_process:
            source, share = f"{source}; a restart is enough", 1.0
        kind = FailureKind(cause=cause, mtbf_hours=1 / rate, transient_share=share, source=source)
        kinds.append(kind)
    return FailureModel(
        name=name,
        kinds=tuple(kinds),
        source=f"{DELTA}; errors, of which not all end jobs, so an "
        "upper end; GPU errors only; repair times assumed",
    )


def _build_llama_3_domains() -> FailureModel:
    """Return Llama 3's model with failures of power feeds and pods, too."""
    # A power feed has 128 GPUs, a pod's switch 3,072.
    above = (
        FailureKind(
            cause="power feed of a row of racks",
            gpus=128,
            mtbf_hours=5 * 365 * 24.0,
            transient_share=0.0,
            source="assumed: a row of 8 racks, once in five years",
        ),
        FailureKind(
            cause="aggregation switch of a pod",
            gpus=3_072,
            mtbf_hours=5 * 365 * 24.0,
            transient_share=0.9,
            source="pods of 3,072 GPUs (Llama 3, section 3.3.1); assumed once in five years, 90 % "
            "transient",
        ),
    )
    return msgspec.structs.replace(
        _build_llama_3(),
        name="llama-3-domains",
        kinds=(*_build_llama_3().kinds, *above),
        repairs_at_once=8,
        source=LLAMA_3_SOURCE + "; also power feeds and pods, and 8 repairs at a time (assumed)",
    )


FAILURE_MODELS: Mapping[str, FailureModel] = {
    model.name: model
    for model in (
        _build_llama_3(),
        _build_llama_3_domains(),
        _build_meta_rsc(
            "meta-rsc",
            RSC_1,
            RSC_MTTF,
            f"{RSC}, figure 7: MTTF of jobs, measured 7.9 h at 1,024 GPUs, projected 1.8 h at "
            "16,384 and 0.23 h at 131,072; the measured point is 3.6 times below one rate through "
            "the others, so rates depend on the size",
        ),
        _build_meta_rsc(
            "meta-rsc-1", RSC_1, (), f"{RSC}, section III: RSC-1, 6.50 failures per 1,000 node-days"
        ),
        _build_meta_rsc(
            "meta-rsc-2", RSC_2, (), f"{RSC}, section III: RSC-2, 2.34 failures per 1,000 node-days"
        ),
        _build_delta("delta-h100", _DELTA_H100),
        _build_delta("delta-a100", _DELTA_A100),
        _build_infinite_hbd(),
        FailureModel(
            name="ft-hsdp",
            source=f"{FT_HSDP}; 73 % transient (Unicron), repair times assumed",
            kinds=(
                FailureKind(
                    cause="a server",
                    gpus=GPUS_PER_SERVER,
                    mtbf_hours=FT_HSDP_HOURS * FT_HSDP_GPUS / GPUS_PER_SERVER,
                    source=f"{FT_HSDP}; each taken to be of a server",
                ),
            ),
        ),
    )
}
"""Failure models by name, for traces whose places are single GPUs (see `group_gpus`)."""


# --- Slow for a while -----------------------------------------------------------------------------


class SlowKind(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of temporary slowness: of one worker, or of links that all wait for."""

    cause: str
    share: float
    """Share of the time in which a job has a slow worker, or slow links."""
    hours: float
    """Mean duration of one slow time, in hours."""
    factor: float
    """Factor by which the slow worker, or with slow links the whole job, takes longer."""
    links: bool = False
    source: str = "given by the user"

    def hours_between(self, units: int) -> float:
        """Return the mean hours from the end of one unit's slow time to its next.

        A unit is a worker, or all links together. Among `units` of them, at least one is then slow
        for `share` of the time.
        """
        # Share of time in which a single unit is slow: 1 - (1 - share)^(1 / units).
        slow = -math.expm1(math.log1p(-self.share) / units)
        return self.hours * (1 - slow) / slow


_GREYHOUND = "Greyhound (Wu et al., USENIX ATC 2025, arXiv 2410.12588), section 3"
GREYHOUND_DELAY = 1.34
"""Mean factor by which slow workers or links lengthen large jobs (abstract)."""
_SHARES = {"compute": 0.02, "links": 0.40}
"""Shares of time with slow computation and slow links. Our reading: under 2 %, and 40 %."""
_FACTOR = 1 + (GREYHOUND_DELAY - 1) / sum(_SHARES.values())
"""Slowdown factor of both causes, with which jobs take 1.34 times as long on average."""

SLOW_MODELS: Mapping[str, tuple[SlowKind, ...]] = {
    "greyhound": (
        SlowKind(
            cause="slow computation",
            share=_SHARES["compute"],
            hours=10 / 60,
            factor=_FACTOR,
            source=(
                f"{_GREYHOUND}: slow computation under 2 %, 10 minutes on average; {_FACTOR:.2f} "
                "times as long, with which jobs that wait take 1.34 times as long"
            ),
        ),
        SlowKind(
            cause="slow links",
            share=_SHARES["links"],
            hours=24 / 60,
            factor=_FACTOR,
            links=True,
            source=(
                f"{_GREYHOUND}: slow communication 40 %, 24 minutes on average; {_FACTOR:.2f} "
                "times as long, likewise"
            ),
        ),
    ),
}
"""Models of temporary slowness of workers and links, by name."""
