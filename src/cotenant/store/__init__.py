"""Stores for state: one port, with adapters in memory, in an SQLite file and in etcd."""
