"""Run the process of a worker. Its most important threads:

    thread           number       purpose
    generation N     one an       computes, and waits for other workers; may be abandoned when gloo
                     order        deadlocks (`runtime.replay.stuck_calls`), which no call ends
    reductions       while it     reduces gradients meanwhile, if the schedule has
                     reduces      ops left to compute (`runtime.replay.background_queue`)
    finish           at the end   writes and digests parameters, while heartbeats continue
    steps of copies  one a step   steps copies of others' optimizer states, while it computes
                                  (`runtime.state.late_steps`)
    saving           now and      writes a checkpoint meanwhile (`runtime.checkpoints.checkpoint`)
                     then
    layer sender     one          sends state and gradients to workers that join, at their pace, in
                                  training (`moving.layer_sender`, `moving.layer_server`)
    layers from D.S  one a        receives layers that this worker will need from worker D.S, and
                     sender       applies its steps to them (`moving.layer_receiver`)

The folder's modules:

    main_thread          the process, from joining to its end; actions for each message
    context              what is kept from order to order, what one order needs; the activity
    order_threads        long work, each in a thread
    generation           one order for training, from connecting to closing; gets the layers for it
    training_loop        the iterations of an order, and evaluations
    iteration_reports    reports of each iteration, and their acknowledgements
    device_memory        reaction to a device out of memory; return of freed memory to the system
    injected_faults      failures on purpose, and a slow worker
    checkpointer         when checkpoints are written, and which ones can be read
    fork_server_process  the process that imports what workers need, and forks them

The worker joins the additions to the replay in one process. May import: all of them, and not the
coordinator.
"""
