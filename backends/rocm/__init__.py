"""ROCm memory over RDMA, through NIXL built for ROCm."""
