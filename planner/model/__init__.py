"""The scheduling problem and its solutions, in whole ticks; how to search for them is in `planner.search`.

    ticks          from the user's units to whole numbers
    problem        what is fixed: grid, live workers, durations, memory
    from_job       who holds which layers; what layouts are made for, and the problem of one; in place, or moved
    solution       what is decided: the host of every unit, the start of every op
    bounds         proven lower bounds on the period
    shared_bounds  the same where live holders share all micro-batches
    layout_bound   the same for one layout
    unions         what is joined by pairs
    decompose      divides a problem into pieces that can be solved apart
    arrays         a problem with an assignment as arrays of integers
    start_times    from an order of ops to start times and the period
    assemble       from solved pieces to a schedule
"""
