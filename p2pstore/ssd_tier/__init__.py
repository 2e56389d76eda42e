"""Cold objects on local NVMe: a log of segments in one file or on one block device."""
