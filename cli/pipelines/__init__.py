"""Compare published pipelines with Slipstream's: `slipstream reproduce unlike-layers` and `curves`.

    published_orders    the orders of 1F1B, interleaved 1F1B, ZB-H1, ZB-V and DualPipe, and when their ops run
    measured_layers     times of the layers of models, as published
    unlike_layers       each with its best division of the layers, at equal memory, and what one dead worker costs
    memory_curves       bubble by memory, beside the figures that the authors of zero bubble published
"""
