"""Records: files of a run, and progress lines for its users.

run_log         record of a run: events.jsonl, losses.jsonl, metrics.jsonl, and its schedules
metrics         loss, gradient norm, learning rate and speed of each iteration for dashboards;
                for TensorBoard and Prometheus, too
progress_lines  progress lines for users
writer_thread   thread that accesses the files
"""
