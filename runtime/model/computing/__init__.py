"""Runs what a worker holds.

    slices            the slices that a worker runs, and their micro-batches in flight
    rehearsal         runs each kind of op once, before anything is communicated
    forms             the shapes of what passes, found once; whether a model keeps its contract
"""
