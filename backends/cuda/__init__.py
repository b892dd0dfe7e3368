"""CUDA memory over RDMA, through NIXL's UCX."""
