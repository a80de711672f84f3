"""Simulated annealing over the orders of all workers, in small changes where the plan is critical.

A state is the order of ops on every worker, the worker of every unit (a micro-batch at a stage), and the deadline of
every reduce group (the workers that reduce gradients together). Every op starts as late as these allow, so that each
worker's window is as short as its order permits. A step tries one change (`moves`), times anew what it affects
(`retiming`), and keeps it by the rule of Metropolis on the cost (`cost`). Memory on a worker depends on its order
alone, so that a change is checked by one walk through the worker's ops.

arrays      what the arrays mean
random      random numbers
timing      a state timed from scratch: topological order, latest starts
heads       how early ops can start, so that bad changes are refused at once
retiming    a changed state timed where it changed
cost        windows, and what annealing minimises
critical    critical workers and paths
moves       the changes: exchange, trade, move to another worker
loop        the steps of a cooling cycle
"""
