"""Decisions of the coordinator: the state of a run, what each event changes in it, and which effects follow.

Nothing here waits, opens a connection, or reads a clock. Only `journal` reads a file, before the first event.

    transition           what each event changes and triggers: a function of the state and the event
    run_state            immutable state of the run; builder of the next state
    effects              actions to carry out outside after an event
    persistent_map       map whose versions share their entries
    orders               sends orders to workers
    next_order           chooses the next order once all members have paused
    iteration_boundary   prepares changes while all train; chooses the iteration before which all stop for them
    schedule_requests    requests for schedules, and their answers
    schedule_choice      chooses which schedule to request
    part_moves           computes which parts of layers move between which workers
    lost_workers         losses of workers, and their reasons
    empty_orders         finds the worker at fault for orders in which nothing is committed

    copy_comparison      compares the copies of equal state by their checksums
    sample_comparison    compares the samples that workers have read, and how they have dealt them
    checkpoint_rollback  goes back to a checkpoint if no worker holds some layer, or if copies differ
    failover             finds the workers of a dead coordinator and what they know
    journal              reads what a restarted coordinator knows from the events of the one before it

    layer_fetches        fetches of layers while training continues
    settling             decides whether moving layers to a better schedule pays
    slow_detector        detects which workers are slower than their peers, by what factor, since when
    speed_planning       plans schedules for workers of given speeds; chooses workers to leave out
    slow_workers         state of slow workers: when schedules are planned for them, and when they are tried again

    commit_log           committed iterations; their losses, times and digests
    recovery_clock       durations of recoveries
    checkpoint_timer     time at which the next checkpoint is due
"""
