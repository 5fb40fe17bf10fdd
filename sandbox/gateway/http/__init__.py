"""The gateway's HTTP side: the listening socket, authentication, bodies, routes and pages. All that imports aiohttp.

routes -> exchange -> body_reader, body_parser -> validation, codec -> calls.batch, calls.dispatcher
body_worker: a process that body_parser starts, for large bodies (body_frames)
listener, auth, errors: around every request
"""
