"""The command line: one file per command, each parse -> config -> one call. Decides nothing about serving."""
