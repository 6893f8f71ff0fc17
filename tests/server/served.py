"""Apps of a tiny model for tests of endpoints: over fakes in this process, or a real server in a thread."""
