"""One file a launcher: how a plan's processes are started on a host."""
