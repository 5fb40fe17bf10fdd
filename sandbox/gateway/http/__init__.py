"""The gateway's HTTP side: the listening socket, authentication, bodies, routes and pages. All that imports aiohttp.

routes -> validation, codec, openapi -> calls.batch, calls.dispatcher
listener, auth, errors: around every request
"""
