"""Weight formats and captured graphs for the native CPU kernels; other devices do not use this package."""
