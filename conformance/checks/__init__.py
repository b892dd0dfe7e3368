"""The checks, one module per group; importing a module registers its checks."""
