"""How a schedule is run: ops in program order, and the tensors that pass between workers.

    executor         runs one worker's program, op by op
    evaluation       the loss of validation data, by the forwards alone
    exchange         hands the result of an op to the next one, on the same worker or another
    session          one worker's part in an order: sends, receives, sums, aborts from any thread, commit points
    links            process groups, made when an order begins, used again where nothing was aborted
    sum_tree         sums of numbers over all processes
    transfers        tensors and sums that are on their way
    backend          how process groups are made and aborted
    gloo             gloo, which forgets some of those that wait
    nccl             NCCL, whose communicators another thread must abort
    sockets          finds and shuts the connections of gloo
    transport        which of the two a run uses
    group_store      where the members of a process group leave their addresses
    membership       who trains together, and what each process is among them
    part_exchange    sums of gradients and parameters, where optimizer state is sharded
    placement        where the layers of schedules lie in the model, and who holds them
    recorder         when each op ran
    stuck_calls      finds a thread that is stuck in a process group
"""
