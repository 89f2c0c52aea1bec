"""The embedded engine: a torch engine with paged KV, one in-flight batch and real drafting."""
