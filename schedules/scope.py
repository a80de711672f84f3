"""The question that a bound on the period answers: among which schedules none is shorter."""

from enum import StrEnum


class Scope(StrEnum):
    """From the narrowest question to the widest: what is proven of a wider one holds of a narrower one."""

    ORDER = "order"
    """Who holds what, and who runs what, is given; only the order in time is open."""
    OWN = "own micro-batches"
    """Workers keep their layers. A live worker runs its stages of all micro-batches of its pipeline, and of no others
    but those of failed workers."""
    STAGES = "whole stages"
    """Workers keep their layers, and any holder of a stage may run it for any micro-batch."""
    PLACE = "layers in place"
    """Workers keep their layers, and a micro-batch may be cut within a stage."""
    ROLES = "roles"
    """So many failures, whichever roles are left vacant: live workers may take over others. Slow ones keep theirs."""
    LAYERS = "any layers"
    """Any live worker may hold any layers."""

    def holds_for(self, narrower: "Scope") -> bool:
        """Whether what is proven for this question is proven for another one."""
        return _WIDTH[narrower] <= _WIDTH[self]

    @property
    def words(self) -> str:
        """What follows `no schedule is shorter`."""
        return _WORDS[self]


_WIDTH = {scope: width for width, scope in enumerate(Scope)}
_WORDS = {Scope.ORDER: "with who runs what as it is", Scope.OWN: "with layers and micro-batches in place",
          Scope.STAGES: "with whole stages in place", Scope.PLACE: "with layers in place",
          Scope.ROLES: "whoever plays which role", Scope.LAYERS: "wherever layers are"}
