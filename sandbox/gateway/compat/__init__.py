"""The routes of other services, with their bodies and answers: code-judge and SandboxFusion."""
