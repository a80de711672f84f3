"""Node 0's side of the control plane. It computes nothing.

    event_loop           handles all that happens, one event after the other
    server               the connections of workers and node agents
    heartbeat_monitor    who has been silent for too long
    coordinator          decides: who trains by which schedule from where on
    planning             finds schedules in a thread
    join_planning        who fetches which layers while all train
    layer_moves          which layers move from whom to whom
    commit_log           which iterations are committed; losses, times, digests
    recovery             how long each change of members took
    loss_file            losses.jsonl
"""
