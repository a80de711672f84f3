"""From a job and its failures to a schedule."""
