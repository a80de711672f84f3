"""All policies by name, in the order in which they are shown."""

from collections.abc import Mapping

from slipstream.planner.simulation.policies.bamboo import Bamboo
from slipstream.planner.simulation.policies.elaswave import ElasWave
from slipstream.planner.simulation.policies.malleus import Malleus, ResiHP
from slipstream.planner.simulation.policies.oobleck import Oobleck
from slipstream.planner.simulation.policies.references import FaultScaled, WorkConserving
from slipstream.planner.simulation.policies.rerouting import ReCycle
from slipstream.planner.simulation.policies.restart import Restart
from slipstream.planner.simulation.policies.slipstream import Slipstream, SlipstreamFixed
from slipstream.planner.simulation.policies.torchft import FTHSDP, TorchFT
from slipstream.planner.simulation.policy import Policy

POLICIES: Mapping[str, type[Policy]] = {
    kind.name: kind
    for kind in (
        Slipstream,
        SlipstreamFixed,
        ReCycle,
        Oobleck,
        ElasWave,
        Malleus,
        ResiHP,
        Bamboo,
        TorchFT,
        FTHSDP,
        Restart,
        FaultScaled,
        WorkConserving,
    )
}
