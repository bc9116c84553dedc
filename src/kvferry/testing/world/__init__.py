"""The whole cache under a seed: engines, ranks, tiers, peers, servers, faults and restarts in one
thread and in virtual time. A failure is replayed by one line (docs/world.md).

    loop.py     virtual time, and tasks in the place of threads
    threads.py  what stands in for threads, clocks and queues: the seam to kvferry
    media.py    servers that are dicts, links between peers, and their faults
    records.py  records of other writers
    kv.py       KV that checks itself
    shapes.py   how hosts and engines are set up
    requests.py requests of a host, and its steps
    memory.py   which of a host's blocks requests hold, and which its prefix cache offers
    device.py   computes NaN when a scenario says so
    host.py     the simulated host: schedules requests over that KV
    engine.py   an engine: the cache as hosts open it, over such a host
    scenario.py what a scenario is
    world.py    engines, media, peers; what can happen to them
    life.py     the life of a world from its start to its close, and liveness
    running.py  runs scenarios behind the seam
    seeds.py    draws scenarios from seeds, and shortens those that fail
    named.py    scenarios with a name
"""
