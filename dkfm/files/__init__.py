"""Open, write atomically, and watch files of any format on a file system or an object store."""
