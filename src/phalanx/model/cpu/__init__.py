"""What is done for the native CPU kernels alone: weight formats and captured graphs."""
