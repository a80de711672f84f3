"""Published pipelines, layers and bubbles, and plans for the same: `slipstream reproduce unlike-layers` and `curves`.

    orders              the orders of 1F1B, interleaved 1F1B, ZB-H1, ZB-V and DualPipe, and when their ops run
    measured_layers     times of the layers of models, as published
    unlike_layers       each order with its best division of the layers, at equal memory, and what one dead worker costs
    memory_curves       bubble by memory, beside the figures that the authors of zero bubble published

Nothing else in `planner` imports this folder (a contract in `pyproject.toml`); `cli/figures/` makes figures of it.
"""
