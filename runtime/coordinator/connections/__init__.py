"""Connections to workers and node agents, as the coordinator sees them.

    server               connections, and who may say what over them
    worker_connections   which workers are connected, silent, given up, or at their end
    rank_reports         what the processes of a worker say, put together into what it says
    node_agents          which other nodes are there, what they are told, and the reports that they gather
    message_validation   what a message may say
    stall_watch          who keeps the run from going on, when nothing has been committed for long
"""
