"""All policies by name, in the order in which they are shown."""

from collections.abc import Mapping

from slipstream.cli.fleet.policies.bamboo import Bamboo
from slipstream.cli.fleet.policies.elaswave import ElasWave
from slipstream.cli.fleet.policies.malleus import Malleus, ResiHP
from slipstream.cli.fleet.policies.oobleck import Oobleck
from slipstream.cli.fleet.policies.references import FaultScaled, WorkConserving
from slipstream.cli.fleet.policies.rerouting import ReCycle
from slipstream.cli.fleet.policies.restart import Restart
from slipstream.cli.fleet.policies.slipstream import Slipstream, SlipstreamFixed
from slipstream.cli.fleet.policies.torchft import FTHSDP, TorchFT
from slipstream.cli.fleet.policy import Policy

POLICIES: Mapping[str, type[Policy]] = {kind.name: kind for kind in (
    Slipstream, SlipstreamFixed, ReCycle, Oobleck, ElasWave, Malleus, ResiHP, Bamboo, TorchFT, FTHSDP,
    Restart, FaultScaled, WorkConserving)}
