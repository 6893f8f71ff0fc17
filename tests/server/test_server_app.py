"""The application: errors in one shape, ids, hosts, keys; every route is closed without a key."""
