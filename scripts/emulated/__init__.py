"""The parts of scripts/cluster: hosts of an emulated cluster on one Linux machine."""
