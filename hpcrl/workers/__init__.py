"""What runs inside Dask workers: hosts of agent loops, sandbox nodes, and the lines between them.

    scheduler --task(ticket)--> host ==one multiplexed line per pair==> sandbox node
    driver --call(method)----> host, sandbox node        host --events--> scheduler

The Dask worker is a guest in these processes (guest.py): loops and sandboxes belong to the process, and the worker is
made again at the next scheduler's address when control was restarted.
"""
