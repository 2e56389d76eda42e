"""A checkpoint's files, tensors and pieces: on disk, in memory, and in the manifest."""
