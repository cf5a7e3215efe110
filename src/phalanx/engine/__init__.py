"""What a rank is: boot, the leader's loop, the worker's, the mirror both keep, the self-test."""
