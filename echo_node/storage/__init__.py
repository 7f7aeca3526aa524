"""Files, folders and databases that a node keeps."""
