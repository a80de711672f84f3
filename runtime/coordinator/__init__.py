"""The coordinator, in the launcher of node 0: it decides who trains by which schedule, and computes nothing itself.

    event_loop           handles all events, one after the other: messages, missed heartbeats, ended processes
    server               the connections of workers and node agents
    gathering            who is waited for before the first order
    heartbeat_monitor    which workers have been silent for too long
    stall_watch          who keeps the run from going on, when nothing has been committed for long
    coordinator          decides on orders: members, schedule, first iteration
    planning             finds schedules in threads
    join_planning        which workers fetch which layers while training goes on
    layer_moves          which layers move from which worker to which
    commit_log           which iterations are committed; losses, times, digests
    recovery             how long each change of members took
    loss_file            losses.jsonl
"""
