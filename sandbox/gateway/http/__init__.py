"""The gateway's HTTP side: the listening socket, authentication, bodies, and the routes of its own API.

judge, cancel, mcp -> exchange -> body_reader, body_parser -> validation, codec -> calls.batch, calls.dispatcher
body_worker: a process that body_parser starts, for large bodies (body_frames)
listener, auth, errors: around every request
"""
