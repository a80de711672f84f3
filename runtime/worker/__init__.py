"""A worker's process. Its threads:

    thread             there is    reason
    main               one         reads what the coordinator sends and sends heartbeats, however long computing takes
    generation N       one an      computes, and waits for other workers; it may have to be left behind where gloo
                       order       deadlocks (`runtime.replay.stuck_calls`): no call ends such a wait
    finish             at the end  writes and digests parameters, while heartbeats go on
    saving             now and     writes a checkpoint while training goes on (`runtime.model.checkpoint`)
                       then
    source             one         accepts workers that come in and ask for layers (`layer_sender`)
    asked, line        two a       hear what one of them asks, and send it state and gradients as it can take them,
                       receiver    while the worker trains
    following          one a       builds the stages that it will need while the worker trains (`layer_receiver`)
                       fetch
    following D.S      one a       applies what one of the sources sends, each at its own pace
                       source
"""
