"""What the NIXL-based backends (cuda, efa, rocm) share.

Architecture
    ``engine.py`` implements the ``Backend`` contract over one NIXL agent;
    the backends above it choose a NIXL plugin, check its environment and
    declare capabilities.

Memory model
    Each registered region is one NIXL registration.  Host regions carry a
    device id of their own in NIXL's descriptors, so that two registrations of
    one address never meet in its lookup tables; device memory carries its real
    device index.

Lifecycle
    ``export`` holds one piece of NIXL metadata per region, so that a peer can
    learn new regions without touching the old ones.  An agent's name inside
    NIXL is its name here plus a random suffix: a restarted peer is a new NIXL
    agent and never collides with its former self.

Quiet
    NIXL releases a transfer in flight and lets its data land later, so this
    engine never releases one.  What fails without proof that it is over is
    kept, unreported, until ``close``.

Threading
    The contract's: one call at a time.  By default NIXL runs a progress thread
    that sleeps on the transport's event descriptor.

=================  ==========================================================
``driver.py``      finding and typing NIXL's Python module
``native.py``      its exceptions and states in our words
``process.py``     what else is loaded in this process; the environment
``config.py``      options that all NIXL backends have
``body.py``        what one agent tells its peers
``regions.py``     local and remote regions as NIXL descriptors
``tables.py``      prepared descriptor tables, kept between transfers
``flight.py``      one transfer: its parts and their handles
``peers.py``       imported agents
``engine.py``      the ``Backend``
=================  ==========================================================
"""
