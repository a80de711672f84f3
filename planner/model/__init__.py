"""The scheduling problem and its solutions, in whole ticks; how to search for them is in `planner.search`.

    problem        what is fixed: grid, live workers, durations, memory; which layouts may be made; what a solution is
    from_job       the problem of a job with layers in place, and that of a layout
    bounds         proven lower bounds on the period
    decompose      divides a problem into pieces that can be solved apart
    arrays         a problem with an assignment as arrays of integers
    start_times    from an order of ops to start times and the period
    assemble       from solved pieces to a schedule
"""
