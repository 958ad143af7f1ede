"""The store: every step of a run, kept the moment it happens.

records             what is stored, and its bytes
segment, log, link  where it becomes durable: a node's log, and the socket that feeds it
shard, compact      the sealed HDF5 form, and how segments become it
index, rows         Store, the reader over both
ledger              the files between control and learner
query, verify       a table for pandas; is the store sound
prune, repair       making room; rescuing what is intact in damaged files
export              Parquet and JSON lines for other programs
"""
