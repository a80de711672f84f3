"""Share code between commands.

console         answers, errors, progress in a log, and Ctrl-C
options         arguments and options that several commands take; the files that they name
outputs         which options name files to write, and what these may replace
planning        plans for commands, with progress
plan_summary    a plan in a few lines
summaries       a schedule, a run and its events in words
train_options   the options of `slipstream train`
launch_options  which node a process is, and what is rehearsed; without torch
run_start       where a run starts: checkpoints, tables, what is left to do
run_process     a run's progress, result, exit status and restarts
"""
