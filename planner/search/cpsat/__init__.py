"""The exact model of the scheduling problem in OR-Tools CP-SAT."""
