"""Run a worker's program in order, and pass tensors between workers: the runtime's core.

This folder runs a program (`schedules.program`) with the layers, optimizer, samples, recorder and
transport that it is given (`seams`), up to a commit point. Of the runtime it imports `errors`
alone; all other folders are built on it.

    executor          runs one worker's program, op by op
    seams             what the executor is given, as interfaces
    layer_values      values that pass from layer to layer: a tensor, or a tuple of tensors
    microbatch        the name of a micro-batch
    exchange          passes the result of an op to the next op, on the same worker or another
    session           a worker's communication in a generation: sends, sums, aborts, commit points
    group_cache       process groups, reused by the next generation if nothing was aborted in them
    sum_tree          sums of numbers over all processes
    transfers         tensors and sums in transfer
    backend           interface for creating and aborting process groups
    gloo              gloo, which forgets some of the calls that wait
    nccl              NCCL, whose communicators another thread must abort
    sockets           finds and shuts down the connections of gloo
    transport         the names of the transports (their interface: `backend`)
    torch_groups      stores and process groups of torch that its documentation does not cover
    background_queue  work in a thread and a stream of its own
    group_store       key-value store in which the members of a process group leave their addresses
    membership        members of a generation, and the processes of each
    recorder          records when each op ran
    stuck_calls       finds a thread that is stuck in a process group
    python_exit       lets Python end only when threads are back from torch
"""
