"""Every policy by name, in the order in which they are shown."""

from collections.abc import Mapping

from planner.fleet.policies.bamboo import Bamboo
from planner.fleet.policies.elaswave import ElasWave
from planner.fleet.policies.malleus import Malleus, ResiHP
from planner.fleet.policies.oobleck import Oobleck
from planner.fleet.policies.recycle import ReCycle
from planner.fleet.policies.references import FaultScaled, WorkConserving
from planner.fleet.policies.restart import Restart
from planner.fleet.policies.slipstream import Slipstream, SlipstreamFixed
from planner.fleet.policies.spares import Spares, TrainMover
from planner.fleet.policies.torchft import TorchFT
from planner.fleet.policy import Policy

POLICIES: Mapping[str, type[Policy]] = {kind.name: kind for kind in (
    Slipstream, SlipstreamFixed, ReCycle, Oobleck, ElasWave, Malleus, ResiHP, Bamboo, TorchFT, Restart, Spares,
    TrainMover, FaultScaled, WorkConserving)}
