"""The simulator: the very scheduler and cache, priced plans, a virtual clock."""
