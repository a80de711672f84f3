"""Provide published pipelines, layers and bubbles, and make plans to compare with them.

    orders              the orders of 1F1B, interleaved 1F1B, ZB-H1, ZB-V and DualPipe, simulated
    measured_layers     times of the layers of models, as published
    unlike_layers       each order with its best division of the layers, at equal memory
    memory_curves       bubble by memory, beside the figures of the authors of zero bubble

`slipstream reproduce unlike-layers` and `curves` show them. Nothing else in `planner` imports this
folder (a contract in `pyproject.toml`); `cli/figures/` makes figures of it.
"""
