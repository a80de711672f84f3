"""Annealing of plans, on the arrays and loops of `planner.kernel`.

    arrays     from a problem and a plan to the kernel's arrays
    chain      improves a plan of one piece, in slices between which it can be stopped
    pieces     all pieces of a job together
"""
