"""Find the shortest period of tiny jobs exactly, to judge what the planner claims."""
