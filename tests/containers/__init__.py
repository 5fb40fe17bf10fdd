"""Containers with other users, seccomp profiles and limits. `docker/test` tries the server in each."""
