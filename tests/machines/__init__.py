"""Virtual machines with other kernels, users and cgroups. `python -m tests.machines` tries the server in each."""
