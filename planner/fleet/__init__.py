"""What failures cost over days and weeks: traces of a fleet, policies that live with them, and their comparison.

    availability_trace    which machines are alive, over time
    trace_file            reads traces
    synthetic_trace       draws traces from mean times between failures
    policy                what a policy is: it answers each change with phases
    policies/             one module for each policy
    costs                 seconds to restart, reconfigure and load, as published
    loads                 what workers have to compute, and where failures cost least
    settled               plans for failures with layers that move
    round_robin           schedules in place of those of ReCycle's solver
    throughput            samples per second of the schedules that policies run
    simulation            takes policies through a trace, and adds up the time lost
    figures/              the published figures, computed again
"""
