"""Settings of the server: the TOML file, environment variables and flags, own profiles, mounts and tenants."""
