"""The store: every step of a run, kept the moment it happens.

records             what is stored, and its bytes
segment, log, link  where it becomes durable: a node's log, and the socket that feeds it
seal                closing what owners left open that are gone
shard, skeleton     the sealed HDF5 form
pack, compact       how segments become it
rows, catalog       what an index is made of; which records lie where
index               Store, the reader over both
ledger              the files between control and learner
query, verify       a table for pandas; is the store sound
remains, salvage    what is intact in damaged bytes, and in a damaged file
prune, repair       making room; rescuing what is intact in damaged files
export              Parquet and JSON lines for other programs
sample, bench       records as a run makes them, and how fast the store takes them
"""
