"""Searches for the best solution of a problem within a budget.

    engine            candidates are ordered, the promising ones improved, the best one proven
    proposals         the candidates: a problem with layers in place, and layouts
    incumbent         a candidate: its pieces, the best solution of each so far, the bound
    bound, list_schedules, anneal, prove
                      what is done to a candidate, within a budget
    assignment        which peers run the micro-batches of dead and of slow workers
    list_scheduler    one list schedule, by one dispatch rule; what others run: 1F1B, ReCycle
    dispatch_rules    a shortlist, a grid, and random neighbours of dispatch rules
    list_search       many of them, the best kept
    composition       pipelines that share no worker, each with the order that is best for it
    annealing/        simulated annealing of orders and hosts
    cpsat             the exact model in CP-SAT
    evidence          which of plan and bound is likely to leave a gap
"""
