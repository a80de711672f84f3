"""A worker's process. Its threads:

    thread           there is     reason
    main             one          reads what the coordinator sends and sends heartbeats, however long computing takes
    generation N     one an       computes, and waits for other workers; it may have to be left behind where gloo
                     order        deadlocks (`runtime.replay.stuck_calls`), since no call ends such a wait
    finish           at the end   writes and digests parameters, while heartbeats go on
    saving           now and      writes a checkpoint while training goes on (`runtime.model.checkpoint`)
                     then
    layer sender     one          sends state and gradients to workers that come in, as they can take them, while this
                                  one trains (`layer_sender`, `layer_server`)
    layer receiver   one a fetch  builds the layers that it will need while it trains
                                  (`layer_receiver`)
    layers from D.S  one a        applies what one sender sends, each at its own pace
                     sender
"""
