"""Connections to workers and node agents, on the coordinator's side.

server               accepts connections, and checks which peer may send which message
worker_connections   tracks which workers are connected, silent, given up, or ended
rank_reports         combines the messages of a worker's processes into messages of the worker
node_agents          tracks connected nodes, and exchanges batches of reports with them
message_validation   checks the values in messages
stall_watch          finds the workers that hold up a run without commits
"""
