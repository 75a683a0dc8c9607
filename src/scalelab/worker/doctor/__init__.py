"""What `scalelab doctor` starts in processes of its own: the roofline, NCCL, and the self-test of a device."""
