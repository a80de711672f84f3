"""Workers of several processes: their own process group, and layers of which each rank has a part.

    worker_group     the process group of a worker's ranks, which lasts from order to order
    shards           parameters of which each rank has a part
    tensor_parallel  products and losses over the ranks

It adds a second group of processes to `replay`, and knows no model, data or state.
"""
