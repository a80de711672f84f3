"""A worker's process. Its threads:

    thread           there is     reason
    main             one          reads what the coordinator sends and sends heartbeats, however long computing takes
    generation N     one an       computes, and waits for other workers; it may have to be left behind where gloo
                     order        deadlocks (`runtime.replay.stuck_calls`), since no call ends such a wait
    reductions       while it     reduces gradients beside what the generation computes, where the schedule has
                     reduces      something left to compute (`runtime.beside`)
    finish           at the end   writes and digests parameters, while heartbeats go on
    steps of copies  one a step   steps what the worker keeps of others' optimizer states, while it computes
                                  (`runtime.model.state.late_steps`)
    saving           now and      writes a checkpoint while training goes on (`runtime.model.checkpoints.checkpoint`)
                     then
    layer sender     one          sends state and gradients to workers that come in, as they can take them, while this
                                  one trains (`layer_sender`, `layer_server`)
    layer receiver   one a fetch  builds the layers that it will need while it trains
                                  (`layer_receiver`)
    layers from D.S  one a        applies what one sender sends, each at its own pace
                     sender

Its parts:

    main                 the process: it connects, and tells of an error that ends it
    main_thread          what each message begins; finding another coordinator
    setting_up, context  what lasts from order to order, and what one order needs besides
    order_threads        what takes long, each in a thread
    generation           one order for training, from its connections to their end
    layers_of_order      gets the layers that the order needs, drops the others
    training             the iterations of the order
    reports              what is reported of each, and acknowledged
    activity             what it does at a moment
    device_memory        what is done where a device has no room; what an order has freed goes back to the system
    layer_store          the layers that it holds
    layer_*              how layers get from worker to worker
    checkpointer, slowed_recorder
"""
