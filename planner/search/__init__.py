"""Searches for the best solution of a problem within a budget.

- `engine`: orders the ops of each candidate, improves the promising ones, proves the best one
- `incumbent`: a candidate: its subproblems, the best solution of each so far, the bound; sources of candidates
- `improvement`: improves candidates
- `list_search`: many schedules by rules: a shortlist and a grid of rules, random steps from the best
- `list_scheduler`: one list schedule of one assignment under one dispatch rule; baselines: 1F1B, ReCycle
- `least_loaded`: who runs re-routed micro-batches: the workers with the least to do
- `round_scheduler`: one order in rounds of one assignment, for little memory, under one rule
- `interleaved_scheduler`: one order in which F and I of a worker's stages take turns: interleaved stages, or a V
- `annealing`: simulated annealing of orders and hosts
- `cpsat`: the exact model in CP-SAT
"""
