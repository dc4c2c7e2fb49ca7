"""What stock and prefetch cost, with a tail on the device, and what tuning chooses."""
