"""Files on a file system or an object store: opened, written atomically, watched for changes; of any format."""
