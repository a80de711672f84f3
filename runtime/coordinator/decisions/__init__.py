"""Decisions of the coordinator: the state of a run, what each event changes in it, and which effects follow.

Nothing here waits, opens a connection, or reads a clock. Only `failover` reads a file, before the first event.

    transition           what each event changes and triggers: a function of the state and the event
    run_state            immutable state of the run; builder of the next state
    effects              actions to carry out outside after an event; requests for schedules, and their answers
    persistent_map       map whose versions share their entries
    orders               chooses the schedule of an order, and sends orders; losses of workers, and their reasons
    next_order           prepares changes while all train, and chooses the next order once all have paused
    part_moves           computes which parts of layers move between which workers

    comparisons          compares copies of equal state by their checksums, and the samples that workers have read
    checkpoint_rollback  goes back to a checkpoint if no worker holds some layer, or if copies differ
    failover             finds the workers of a dead coordinator, and what they and its events know

    settling             decides whether moving layers to a better schedule pays; fetches of layers meanwhile
    slow_detector        detects which workers are slower than their peers, by what factor, since when
    slow_workers         plans schedules for workers of given speeds; when, and when workers left out are tried again

    commit_log           committed iterations; their losses, times and digests; when a checkpoint is due
    recoveries           durations of recoveries; the worker at fault for orders in which nothing is committed
"""
