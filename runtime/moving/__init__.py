"""Layers that move from worker to worker while all train.

    layer_messages  what a receiver asks of a sender, and what it gets
    layer_sender    answers receivers, in a thread of the worker that holds the layers
    layer_server    connections to receivers, each at its own pace
    layer_receiver  asks senders for layers, in a thread for each of them
    layer_store     layers that the worker holds, and their parts as they are sent
    received_part   parts that another worker owns, received while it trains

Adds to the replay: workers join and layers move without a pause. May import: `replay`, `ranks`,
`models`, `state`, `protocol`.
"""
