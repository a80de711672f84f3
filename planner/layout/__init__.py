"""Which live worker holds which layers, and the route of each micro-batch: what is decided before any order in time.

    candidates     layouts, the most promising first
    fixed          nobody holds more than before: live holders share the work of a stage
    cuts           which workers form lines; one cut for all pipelines
    lines          the layers of a line, cut over its workers; the least longest load
    division       the work of an iteration, divided over lines
    cpsat          the exact assignment of layers and micro-batches to lines
    routes         from a division to the route of each micro-batch
    groups         large clusters: those that share work, like ones alike

Each is made from a problem (`planner.model.from_job.layered_problem`), and makes another one of it (`with_layout`).
"""
