"""Small real things for tests and smoke runs: an environment without a simulator."""
