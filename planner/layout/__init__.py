"""Layouts: which live worker holds which layers, and the route of each micro-batch, chosen before any order in time.

    candidates     layouts, the most promising first; in large clusters group by group
    fixed          layouts in which no worker holds more than before: live holders share the work of a stage
    division       the division of an iteration's work over the live workers, and the routes that follow from it

A layout is made from a problem (`planner.model.from_job.build_layered_problem`), and gives a new problem
(`with_layout`).
"""
