"""The prefix cache on disk: the files of one rank."""
