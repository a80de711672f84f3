"""All policies, and systems of others, simulated on a versioned set of cases: `python -m benchmarks.fleet`.

    cases    the set, seeds side by side, sensitivity, distance to published figures
    page     what it writes, as a page
    text     as tables in Markdown
"""
