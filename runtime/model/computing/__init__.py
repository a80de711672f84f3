"""Execution of the layers that a worker holds.

    slices            the slices that a worker runs, and their micro-batches in flight
    rehearsal         runs each kind of op once, before anything is communicated
    forms             the shapes that pass between layers, found once; checks that a model keeps its contract
"""
