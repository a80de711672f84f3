"""Which live worker holds which layers, and the route of each micro-batch: what is decided before any order in time.

    candidates     layouts, the most promising first; in large clusters group by group
    fixed          nobody holds more than before: live holders share the work of a stage
    division       the work of an iteration, divided over the live workers; the routes that follow

Each is made from a problem (`planner.model.from_job.layered_problem`), and makes another one of it (`with_layout`).
"""
