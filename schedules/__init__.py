"""The contract between planner, runtime and command line: what a schedule is, its JSON, and the independent checker.

    schedule          a schedule as data: grid, ops, costs, and the question that its bound answers
    precedence        which op of a micro-batch waits for which, as a table
    codec             schedules as JSON (`document` and `files` read and write within bounds)
    check             whether a schedule obeys every rule (`equal`, `text_excerpt`)
    memory            how much each worker holds, and when
    graph             ops and transfers as a graph: the order of sends and receives, proven free of deadlock
    parts             what each worker must know of a schedule, and no more
    timing            a schedule replayed under other durations
    measured_trace    when ops really ran
    torchcsv          orders of torch.distributed.pipelining
    tables/           tables of schedules for many failures
    library/          tables that come with the package, read by name
"""
