"""Prefixes on a disk: the files of one rank, and the threads that write and read them."""
