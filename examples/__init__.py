"""Programs and environments that use the sandbox and the trainer. README.md has their commands."""
