"""What stock, prefetch and a look at a dataset cost, and what tuning chooses."""
