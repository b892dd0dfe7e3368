"""Elastic Fabric Adapter, through NIXL's LIBFABRIC."""
