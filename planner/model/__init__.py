"""The scheduling problem and its solutions, in whole ticks; how to search for them is in `planner.search`.

    ticks          from the user's units to whole numbers
    layer_ticks    what each layer costs
    layout         who holds which layers, and the route of each micro-batch
    problem        what is fixed: grid, live workers, durations, memory; which layouts may be made
    from_job       the problem of a job with layers in place, and that of a layout
    solution       what is decided: the host of every unit, the start of every op
    bounds         proven lower bounds on the period
    shared_bounds  the same where live holders share all micro-batches
    work_bounds    the same for every layout that may be made, and for those in place
    layout_bound   the same for one layout
    unions         what is joined by pairs
    decompose      divides a problem into pieces that can be solved apart
    arrays         a problem with an assignment as arrays of integers
    start_times    from an order of ops to start times and the period
    assemble       from solved pieces to a schedule
"""
