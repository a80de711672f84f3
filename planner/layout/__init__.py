"""Choose which live worker holds which layers, and each micro-batch's route.

    candidates     layouts, the most promising first; in large clusters group by group
    fixed          layouts in which no worker holds more than before: live holders share the work
    division       the division of an iteration's work over the workers, and the routes from it

No order in time is chosen here. A layout is made from a problem
(`planner.model.from_job.build_layered_problem`), and gives a new problem (`with_layout`).
"""
