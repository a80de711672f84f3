"""The coordinator, in the launcher of node 0: it decides who trains by which schedule, and computes nothing itself.

    event_loop           handles all events, one after the other: messages, missed heartbeats, ended processes
    run                  what it is given
    server               the connections of workers and node agents
    node_agents          which other nodes are there, and what they are told
    plausible            what a message may say
    gathering            who is waited for before the first order
    heartbeat_monitor    which workers have been silent for too long
    stall_watch          who keeps the run from going on, when nothing has been committed for long
    coordinator          decides on orders: members, schedule, first iteration
    lost_workers         why each is gone
    planning             finds schedules in threads
    join_planning        which workers fetch which layers while training goes on
    layer_moves          which layers move from which worker to which
    commit_log           which iterations are committed; losses, times, digests
    recovery             how long each change of members took
    checkpoint_timer     when the next checkpoint is due
    loss_file            losses.jsonl
    event_log            events.jsonl
"""
