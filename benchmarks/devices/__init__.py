"""Measure what the devices of a machine do: `python -m benchmarks.devices`.

__main__      the steps, each a process with a time limit; the page
step          the process of a step
report, page  rows, and what they make together
crew          processes of a step that may hang
process_tree  the stacks of processes, and their end
machine, pair, teams, training, pipelining, storm, card_memory
              what the steps do
"""
