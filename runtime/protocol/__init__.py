"""What the coordinator, the workers and the node agents say to each other.

There is one TCP connection (`channel`) from each worker and each node agent to the coordinator, which is node 0's
launcher. Messages are pushed, and arrive in the order in which they were sent:

    worker     -> coordinator    `to_coordinator.ToCoordinator`
    node agent -> coordinator    `to_coordinator.ToCoordinator`
    coordinator -> worker        `to_worker.ToWorker`
    coordinator -> node agent    `to_node_agent.ToNodeAgent`

Everything is JSON that msgspec checks against these types; nothing is ever unpickled. Whoever can reach the
coordinator's port can join the run: it listens on the address it is given and nowhere else, loopback by default.
torch's key-value store (`rendezvous.host_store`) is only where process groups find each other.
"""
