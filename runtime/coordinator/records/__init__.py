"""Records: what is kept of a run in files, and told to people.

    run_log              the record of a run: events.jsonl, losses.jsonl, metrics.jsonl, its schedules
    metrics              what dashboards show of each iteration: loss, gradient norm, learning rate, speed
    tensorboard          the same for TensorBoard
    progress_lines       the lines that people are told
    appended_file        files that never end a run
    writer_thread        the thread that touches files
"""
