"""Searches for the best solution of a problem within a budget.

    solve             the steps, one after the other
    steps/            each step: bound, list schedules, find, anneal, prove
    incumbent         what is passed from step to step: the best so far, and the bound
    budget            what a step may use: time, a seed, a way to be stopped
    assignment        which peers run the micro-batches of dead and of slow workers
    set_aside         memory that a list scheduler keeps free, so that it never gets stuck
    list_scheduler    one list schedule, by one dispatch rule
    dispatch_rules    a shortlist, a grid, and random neighbours of dispatch rules
    list_search       many of them, the best kept
    composition       pipelines that share no worker, each with the order that is best for it
    baselines         what others run: 1F1B, ReCycle
    annealing/        simulated annealing of orders and hosts
    cpsat/            the exact model in CP-SAT
    evidence          which of plan and bound is likely to leave a gap
    kernel/           the inner loops, as numba compiles them
    compiled          when they are compiled, and where the machine code is kept
"""
