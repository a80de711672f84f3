"""Use torchtitan's models by name; each layer is a decoder with this layer's modules only.

    specification   the model that `[model] torchtitan` names; which can be cut into layers
    model           the `LayeredModel`, also over the ranks of a worker; torchtitan's checkpoints
    experts         mixtures of experts: tokens counted in the backward, and a rule for the bias
    training        the configuration of torchtitan's Trainer, as the configuration of a run

They are for torchtitan 0.3.0. Importing any of them raises ConfigError if torchtitan, or a package
that it needs, is not installed.
"""

from slipstream.runtime.config import ConfigError
from slipstream.runtime.errors import first_line

try:
    import torchtitan.trainer  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"torchtitan 0.3.0 is needed: {first_line(error)}; pip install -e '.[torchtitan]'"
    ) from None
