"""The contract between the rooms: what a schedule is, its JSON, and the independent checker."""
