"""One server over several engines: a front that routes requests to replicas by their beginnings, so that a conversation
meets its KV cache again, and sends what a lost replica had not begun to another one. `replicas.py` has Ray run them,
`ray.py` is the process of the front; nothing else here knows Ray."""
