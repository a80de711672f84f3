"""Searches for the best solution of a problem within a budget.

    engine            candidates are ordered, the promising ones improved, the best one proven
    incumbent         a candidate: its pieces, the best solution of each so far, the bound; where candidates come from
    list_schedules    a candidate is ordered: a solution of each of its pieces
    improve           its solutions are annealed, small pieces proven by CP-SAT
    assignment        which peers run the micro-batches of dead and of slow workers
    list_scheduler    one list schedule, by one dispatch rule; what others run: 1F1B, ReCycle
    dispatch_rules    a shortlist, a grid, and random neighbours of dispatch rules
    list_search       many of them, the best kept
    composition       pipelines that share no worker, each with the order that is best for it
    annealing/        simulated annealing of orders and hosts
    cpsat             the exact model in CP-SAT
"""
