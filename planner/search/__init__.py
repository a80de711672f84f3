"""Searches for the best solution of a problem within a budget.

- `engine`: orders the ops of each candidate, improves the promising ones, proves the best one
- `incumbent`: candidates: subproblems, the best solution of each so far, the bound; their source
- `improvement`: improves candidates
- `list_search`: many schedules by rules: a shortlist and a grid, random steps from the best
- `list_scheduler`: one list schedule of one assignment under one dispatch rule; baselines: 1F1B,
  ReCycle
- `least_loaded`: who runs re-routed micro-batches: the workers with the least to do
- `round_scheduler`: one order in rounds of one assignment, for little memory, under one rule
- `interleaved_scheduler`: one order in which F and I of a worker's stages take turns
- `annealing`: simulated annealing of orders and hosts
- `cpsat`: the exact model in CP-SAT
- `layer_model`: the same for layers in place of stages, for small jobs
"""
