"""Messages between the coordinator, the workers and the node agents.

    authentication       who knows the secret of the run: the handshake, the tag behind each message
    channel              one TCP connection: JSON messages, between their length and their tag
    coordinator_link     the connection to the present coordinator, and then to another one
    to_coordinator       from workers and node agents
    to_worker            from the coordinator to workers
    to_node_agent        from the coordinator to node agents
    setup                what a worker must know before its first order
    failure_injection    failures on purpose
    rendezvous           addresses, and torch's key-value store
    interfaces           by which network workers reach each other

Each worker and each node agent has one connection to the coordinator, which runs in the launcher of node 0. Messages
are pushed, and arrive in the order in which they were sent. msgspec checks each against its type; nothing is ever
unpickled, and no message names code or paths. Only who knows the secret of the run is heard. The coordinator's port is
open on the address that is given and on no other, loopback by default. torch's key-value store, which asks for no
secret, holds only the addresses of process groups. docs/threat-model.md says what follows.
"""
