"""Decide what each event changes in the state of a run, and which effects follow.

Nothing here waits or opens a connection. Only `failover.read_journal` reads a file and clocks,
before the first event.

    transition            what each event changes and triggers: a function of state and event
    run_state             immutable state of the run; builder of the next state
    effects               actions to carry out after an event; requests for schedules, and answers
    persistent_map        map whose versions share their entries
    orders                chooses the schedules of orders, and sends these; losses and their reasons
    next_order            prepares changes while all train; chooses the next order when they paused
    part_moves            computes which parts of layers move between which workers
    comparisons           compares checksums of copies, and the samples that workers have read
    checkpoint_rollback   goes back to a checkpoint if a layer has no holder, or if copies differ
    failover              finds the workers of a dead coordinator, and what they and its events know
    rebalancing           whether moving layers pays; fetches of layers, also for joins
    slow_detector         detects which workers are slower than peers, by what factor, since when
    slow_workers          plans schedules for given speeds; when to try workers left out again
    commit_log            committed iterations, losses, times and digests; when a checkpoint is due
    recoveries            durations of recoveries; the worker at fault for empty orders
"""
