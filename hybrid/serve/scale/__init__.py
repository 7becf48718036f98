"""One server over several engines. The front routes requests to replicas by prefix, so that a conversation hits its KV
cache, and retries requests of a lost replica that have no output yet. Only `replicas.py` (replicas as Ray actors) and
`ray.py` (the front's process) depend on Ray."""
