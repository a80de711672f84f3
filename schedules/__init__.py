"""Define schedules, their JSON, and an independent checker.

They are the contract between planner, runtime and command line.

    schedule          a schedule as data, and the scope of its lower bound
    grid, ops         its parts: workers and virtual stages; ops, seats, and what they take
    layers            ranges of layers
    precedence        table of which op of a micro-batch waits for which
    codec             schedules as JSON (`document` and `files` bound what is read and written)
    check             checks a schedule against all rules (`symmetry`, `text_excerpt`)
    memory            how memory is counted: what ops hold over time, and what room layers leave
    graph             ops and transfers as a graph; an order of transfers without deadlock, proven
    crossings         tensors between workers, numbered in an order that all can follow
    program           a worker's program: receive, compute, send, reduce and step, a line each
    rows              the same in the cells of torch.distributed.pipelining
    whole_stages      what such cells can name
    shares            what each worker is sent of a schedule
    forwards          a schedule of forwards only, for validation
    timing            replays of a schedule under other durations
    dealing/          samples of unequal length, dealt to the micro-batches of a schedule
    measured_trace    measured times of ops
    tables/           tables of schedules for many failures
    library/          tables that come with the package, read by name
"""
