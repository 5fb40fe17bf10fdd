"""Runs the server in containers with different users, seccomp profiles and limits. `docker/test` starts this."""
