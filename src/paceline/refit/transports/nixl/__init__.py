"""One-sided reads of registered memory through NIXL: RDMA where there is RDMA."""
