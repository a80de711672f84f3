"""Which live worker holds which layers, and the route of each micro-batch: what is decided before any order in time.

    types          layer ranges, routes, a layout; what a layout must fulfil
    problem        what is given: costs of layers, live workers, what they hold

It builds on plain integers and workers only; it knows neither job files nor `planner.model`.
"""
