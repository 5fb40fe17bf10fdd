"""Calls on the nodes of a Ray cluster: `rstar-sandbox serve --cluster ray[=ADDRESS]`.

    gateway process ── Ray driver process ~~ Ray ~~ one actor per node
      │  Dispatcher, Membership                       node agent
      │                                                 └─ executor
      └─────── frames (sandbox.wire) over TCP ────────────────┘

- Ray places, starts and restarts the actors. Calls and results never pass through Ray.
- Only `ray_nodes` imports Ray, and only in the driver process and in the actors. Ray ends a process that loses its
  cluster, so the gateway must not be such a process.
- A connection belongs to one start of one executor (`handshake`). When the connection ends, the calls of this executor
  are sent to other executors.
- Nothing on a node outlives the gateway, the driver or the actor: see `node_agent`.
"""
