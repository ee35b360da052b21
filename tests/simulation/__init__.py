"""A deterministic simulation of processes, nodes, clocks and a network that all misbehave.

What decides is the shipped code: locks, rounds, leases, connections, watchdog, and the Lua scripts
in a real Lua. Simulated is what lies below it: threads (as greenlets), mutexes, polls, sockets,
clocks, servers. One random number, the seed, decides everything that happens in a schedule.

- `world`: real time, its events, and threads that rest in it
- `nodes`: servers that run the shipped scripts, and restart, forget, freeze
- `network`: connections: in order, slow, broken, with commands that run after their end
- `clients`: processes: clocks, mutexes, polls, and the seam to the shipped code
- `faults`: profiles: how large a world is and what befalls it
- `invariants`: what must be true after every event
- `schedules`: worlds from seeds, and exact interleavings written as lists of steps
- `orders`: sends that take the place of the queued one, their runs, and what must be true of them
- `mutants`: the shortcuts that must be caught, as patches of the shipped code
- `recovery`: workers with worker leases on one `broker`, their faults, and all of that again:
  `recovery_invariants`, `recovery_steps`, `recovery_mutants`
- `runner`: many schedules on all cores: `python3 -m tests.simulation --help`
"""
