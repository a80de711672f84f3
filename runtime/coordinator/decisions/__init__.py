"""Decisions: the state of a run, what each event changes in it, and what is to be done then.

Nothing here waits, opens a connection, or looks at a clock. Only `journal` reads a file, before the first event.

    transition           what each event changes, and what is decided then: a function of the state and the event
    run_state            the state of the run, which never changes; the step from one to the next
    effects              what is to be done outside because of an event
    persistent_map       a map whose versions share their entries
    orders               what is told to workers
    next_order           what follows once all have paused
    iteration_boundary   what is prepared while all train, and the iteration before which all stop for it
    questions            which schedules are asked for; their answers
    schedule_choice      which schedule to ask for
    part_moves           which parts of layers move from which worker to which
    lost_workers         why each is gone

    copy_comparison      whether all who hold some state hold the same
    checkpoint_rollback  what follows where nobody holds some layer any more, or copies of it differ
    failover             what a coordinator goes on from that is started anew
    journal              what it knows from the events of the one before it

    join_planning        which workers fetch which layers while training goes on
    settling             whether layers move to a better schedule, and when that has paid
    slow_detector        which workers take longer than their peers, by what factor, since when
    speed_planning       what is planned for workers of certain speeds; who is left out
    slow_workers         which slow workers there are, when it is planned for them, when those left out are measured

    commit_log           which iterations are committed; losses, times, digests
    recovery_clock       how long each change of members took
    checkpoint_timer     when the next checkpoint is due
"""
