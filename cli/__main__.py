"""`python -m cli` is `slipstream`, for launchers that start Python modules."""

from cli.start import main

main()
