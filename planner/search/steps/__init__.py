"""The steps of `planner.search.solve`: each makes a better incumbent of an incumbent, within a budget.

    bound             divides the problem into pieces, and proves a lower bound
    list_schedules    a solution of every piece
    anneal            better orders and hosts of the pieces that are critical
    find              CP-SAT from scratch, beside the annealing
    prove             CP-SAT from the best so far, on small pieces
"""
