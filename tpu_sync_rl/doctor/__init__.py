"""Says what on this machine, and on the way to a job, stands between a user and fast syncs."""
