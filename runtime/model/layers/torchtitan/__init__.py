"""torchtitan's models, by name: each layer is torchtitan's own decoder with all other modules taken out.

    specification  what `[model] torchtitan` names, and which models of it can be cut into layers
    model          the `LayeredModel`; torchtitan's checkpoints, read layer by layer
    experts        mixtures of experts: tokens are counted in the backward, and a rule steps what follows from that
    ranks          layers over the ranks of a worker, as torchtitan cuts them
    export         a run's checkpoint as one of torchtitan's
    training       what torchtitan's Trainer is configured to do, as the configuration of a run
    trainer_state  the state of that Trainer, as a run's checkpoint, and back

To import any of it raises ConfigError where torchtitan 0.3.0 is not installed, or what it needs.
"""

from slipstream.runtime.config import ConfigError
from slipstream.runtime.errors import first_line

try:
    import torchtitan.trainer  # noqa: F401
except ImportError as error:
    raise ConfigError(f"torchtitan 0.3.0 is needed: {first_line(error)}; pip install -e '.[torchtitan]'"
                      ) from None
