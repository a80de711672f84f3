"""The `slipstream` command: one thin file per command."""
