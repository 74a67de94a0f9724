"""Where state is kept: one port, and adapters in memory, in an SQLite file and in etcd."""
