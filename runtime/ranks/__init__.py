"""Let a worker be several processes, each with a part of its layers.

    worker_group     the process group of a worker's ranks, which lasts from order to order
    shards           parameters of which each rank has a part
    tensor_parallel  products and losses over the ranks

Adds to the replay: a worker may be a group of processes, which `replay.membership.Ranks` names. May
import: `replay`, and the runtime's modules for configuration.
"""
