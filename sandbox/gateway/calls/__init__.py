"""The gateway's bookkeeping of calls: admission, order, dispatch to executors, results. Imports no HTTP.

dispatcher -> call_table -> fair_queue, batch     pure state: no clock, no I/O
dispatcher -> executor_handle -> (sandbox.wire) -> executor process
"""
