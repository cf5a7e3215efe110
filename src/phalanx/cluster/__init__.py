"""From cables to a healthy server and back: hosts, ssh, processes, networks. Runs where MLX is not installed."""
