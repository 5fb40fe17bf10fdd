"""Calls on the nodes of a Ray cluster: `rstar-sandbox serve --cluster ray[=ADDRESS]`.

    gateway process ── Ray driver process ~~ Ray ~~ one actor per node
      │  Dispatcher, Membership                       node agent
      │                                                 └─ executor
      └─────── frames (sandbox.wire) over TCP ────────────────┘

- Ray places, starts and restarts the actors. Calls and results never pass through Ray.
- Only `ray_nodes` imports Ray, and only in the driver process and in the actors. So Ray, which ends a process that
  loses its cluster, cannot end the gateway.
- A connection belongs to one start of one executor (`handshake`). Its calls are sent to other executors when it ends.
- Nothing on a node outlives the gateway, the driver or the actor: see `node_agent`.
"""
