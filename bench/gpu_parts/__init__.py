"""The parts of `bench.gpu`. Each runs in a process of its own (`bench.gpu_parts.__main__`)."""
