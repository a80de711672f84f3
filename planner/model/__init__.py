"""Define the scheduling problem and its solutions, in whole ticks.

    problem        what is fixed: grid, live workers, durations, memory; allowed layouts; a layout
    reduce_groups  groups of workers that hold the same layers, and what they reduce together
    memory         what ops hold in a problem, and what room its workers have
    from_job       the problem of a job with its layers in place, and the problem of a layout
    assumptions    what the lemmas on bounds assume (docs/bounds.md), as predicates of problems
    bounds         proven lower bounds on the period, with layers in place and for each question
    bounds_stage, bounds_chunks, bounds_passage, bounds_layouts, bounds_placements, bounds_roles
                   the lemmas: one stage, several on a worker, all stages in turn, all layers, any
                   placement, any roles
    decompose      divides a problem into pieces that can be solved separately
    arrays         a problem with an assignment as integer arrays; what a solution is
    start_times    computes start times and the period from an order of ops
    assemble       builds a schedule from solved pieces

The searches are in `planner.search`. A *group* is the workers that hold the same layers.
"""
