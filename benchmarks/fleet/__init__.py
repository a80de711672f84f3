"""Simulate all policies, and systems of others, on a versioned set of cases.

    python -m benchmarks.fleet

cases    the set, concurrent seeds, sensitivity, distance to published figures
page     what it writes, as a page
text     as tables in Markdown
"""
