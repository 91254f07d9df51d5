"""What works on this machine, what doesn't, and how to mend it."""
