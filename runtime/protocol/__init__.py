"""Messages between the coordinator, the workers and the node agents.

    channel              one TCP connection: JSON messages, each after its length
    to_coordinator       from workers and node agents
    to_worker            from the coordinator to workers
    to_node_agent        from the coordinator to node agents
    setup                what a worker must know before its first order
    failure_injection    failures on purpose
    rendezvous           addresses, and torch's key-value store

Each worker and each node agent has one connection to the coordinator, which runs in the launcher of node 0. Messages
are pushed, and arrive in the order in which they were sent. msgspec checks each against its type; nothing is ever
unpickled. A process that can reach the coordinator's port can join the run: the port is open on the address that is
given and on no other, loopback by default. torch's key-value store holds only the addresses of process groups.
"""
