"""Who takes part: processes on nodes, orders from the first of them, and what happens when one dies or comes back."""
