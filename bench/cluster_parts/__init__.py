"""The parts of `bench.cluster`. Each measures one thing and returns the content of one key of the result."""
