"""What prefetch costs, with its tail on the device, and what tuning chooses."""
