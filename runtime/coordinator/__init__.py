"""The coordinator, in the launcher of node 0: it decides who trains by which schedule, and computes nothing itself.

    event_loop           makes events of messages, missed heartbeats and ended processes; carries out their effects
    run                  what it is given
    server               connections, and who may say what over them
    worker_connections   which workers are connected, silent, given up, or at their end
    rank_reports         what the processes of a worker say, put together into what it says
    node_agents          which other nodes are there, what they are told, and the reports that they gather
    plausible            what a message may say
    stall_watch          who keeps the run from going on, when nothing has been committed for long
    news                 what people are told, and what files keep of that and of what is committed; who is waited for

    transition           what each event changes, and what is decided then: a pure function of the state and the event
    run_state            the state of the run, which never changes; the step from one to the next
    effects              what is to be done outside because of an event
    persistent_map       a map whose versions share their entries
    boundary             what is prepared while all train, and the iteration before which all stop for it
    next_order           what follows once all have paused
    comparing            whether all who hold some state hold the same
    going_back           what follows where nobody holds some layer any more, or copies of it differ
    take_over            what a coordinator goes on from that is started anew
    journal              what it knows from the events of the one before it
    schedule_choice      which schedule to ask for
    orders               what is told to workers
    lost_workers         why each is gone

    questions            which schedules are asked for; their answers
    planning             finds them beside the event loop
    ahead                finds those for the failures that may come next before these come
    background           does that in processes that are forked, or in threads
    join_planning        which workers fetch which layers while training goes on
    settling             whether layers move to a better schedule, and when that has paid
    slow_detector        which workers take longer than their peers, by what factor, since when
    speed_planning       what is planned for workers of certain speeds; who is left out
    slow_workers         which slow workers there are, when it is planned for them, when those left out are measured
    part_moves           which parts of layers move from which worker to which

    commit_log           which iterations are committed; losses, times, digests
    recovery             how long each change of members took
    checkpoint_timer     when the next checkpoint is due
    run_log              the record of a run: events.jsonl, losses.jsonl, metrics.jsonl, its schedules
    metrics              what dashboards show of each iteration: loss, gradient norm, learning rate, speed
    tensorboard          the same for TensorBoard
    appended_file        files that never end a run
    writer               the thread that touches files
"""
