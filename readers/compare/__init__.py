"""Before and after: the same images from their files and from packed sets (`compare.run`, `compare.cli`)."""
