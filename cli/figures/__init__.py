"""Figures that `slipstream reproduce` computes again: a table, findings and the data of a drawing.

    figure           a figure as data, which `cli.drawing.figure_plot` draws
    failure_cost     the table of the README: what a failure costs under each policy
    memory_curves    bubble by memory, beside published figures
    unlike_layers    published pipelines beside ours, on models whose layers are unlike

`planner.simulation` and `planner.published` compute the numbers.
"""
