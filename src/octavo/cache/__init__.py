"""Pages of KV memory: who holds them, which can be found again, which go first. Never touches a tensor."""
