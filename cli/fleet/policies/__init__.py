"""Every policy by name, in the order in which they are shown."""

from collections.abc import Mapping

from cli.fleet.policies.bamboo import Bamboo
from cli.fleet.policies.elaswave import ElasWave
from cli.fleet.policies.malleus import Malleus, ResiHP
from cli.fleet.policies.oobleck import Oobleck
from cli.fleet.policies.recycle import ReCycle
from cli.fleet.policies.references import FaultScaled, WorkConserving
from cli.fleet.policies.restart import Restart
from cli.fleet.policies.slipstream import Slipstream, SlipstreamFixed
from cli.fleet.policies.spares import ByteRobust, Spares, TrainMover
from cli.fleet.policies.torchft import FTHSDP, TorchFT
from cli.fleet.policy import Policy

POLICIES: Mapping[str, type[Policy]] = {kind.name: kind for kind in (
    Slipstream, SlipstreamFixed, ReCycle, Oobleck, ElasWave, Malleus, ResiHP, Bamboo, TorchFT, FTHSDP,
    Restart, Spares, TrainMover, ByteRobust, FaultScaled, WorkConserving)}
