"""Run schedules: run ops in program order, and pass tensors between workers.

    executor       runs one worker's program, op by op
    seams          what the executor is given, as interfaces: layers, their state, optimizer steps
    own_loop       replay in a user's own loop: no coordinator, job file or run folder
    evaluation     computes the loss of validation data with the forwards of the schedule
    exchange       passes the result of an op to the next op, on the same worker or another
    session        one worker's communication in a generation: sends, receives, sums, aborts, commit points
    group_cache    process groups, created when a generation begins, and reused if nothing was aborted in them
    sum_tree       sums of numbers over all processes
    transfers      tensors and sums in transfer
    backend        interface for creating and aborting process groups
    gloo           gloo, which forgets some of the calls that wait
    nccl           NCCL, whose communicators another thread must abort
    nccl_streams   gives each communicator a stream of its own
    sockets        finds and shuts down the connections of gloo
    transport      chooses gloo or NCCL for a run
    group_store    key-value store in which the members of a process group leave their addresses
    membership     members of a generation, and the processes of each
    part_exchange  sums of gradients, and parameters, if optimizer state is sharded
    dealt_samples  assigns samples to the micro-batches of a schedule by their costs
    recorder       records when each op ran
    stuck_calls    finds a thread that is stuck in a process group
"""
