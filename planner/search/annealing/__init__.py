"""Annealing of plans, on the arrays and loops of `planner.kernel`.

    arrays     from a problem and a plan to the kernel's arrays
    cooling    the cooling cycles of a chain, in turn
    chain      improves a plan of one piece, in slices between which it can be stopped
    pieces     all pieces of a job together
"""
