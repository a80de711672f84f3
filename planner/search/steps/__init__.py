"""The steps of `planner.search.solve`: each makes a better incumbent of an incumbent, within a budget."""
