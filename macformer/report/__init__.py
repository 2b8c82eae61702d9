"""From run records to tables. Needs no torch, no GPU and no data."""
