"""Annealing of plans: chains of one piece on the arrays of the kernel, and all pieces of a job together."""
