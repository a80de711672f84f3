"""Messages between the coordinator, the workers and the node agents.

    authentication       a handshake by which both ends show that they know the secret; tags
    channel              one TCP connection: messages in JSON, between length and tag
    coordinator_link     a connection to the coordinator that can switch to a new coordinator
    to_coordinator       messages from workers and node agents
    to_worker            messages from the coordinator to workers
    to_node_agent        messages from the coordinator to node agents
    setup                settings that a worker needs before its first order
    failure_injection    failures on purpose
    form_codec           shapes and dtypes of values in JSON
    rendezvous           addresses at which node 0 listens
    store                torch's key-value store
    network_interfaces   network interfaces by which workers reach each other
    node_reports         reports of a node's workers, sent together by its agent

Each process of a worker and each node agent has one connection to the coordinator, which runs in
the launcher of node 0. Messages are pushed, and arrive in the order in which they were sent.
msgspec checks each message against its type; nothing is ever unpickled, and no code or path that a
message names is used. Connections are accepted only from processes that know the run's secret. The
coordinator's port is open on the given address alone, by default loopback. torch's key-value store,
which asks for no secret, holds only what process groups need to meet. docs/threat-model.md
describes the consequences.

May import: `replay`, and the runtime's modules for configuration.
"""
