"""Commands of the `slipstream` program, one module per command."""
