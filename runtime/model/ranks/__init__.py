"""A process that stands for several ranks of its worker, because the others are gone.

    degraded          whether a worker could go on as half its processes
    own_ranks         what such a process has, as each of the ranks has it
    rank_holding      layers, and the holdings of the ranks, which keep parts
    rank_parts        such a holding, whose parameters and gradients are elsewhere for most of the time
"""
