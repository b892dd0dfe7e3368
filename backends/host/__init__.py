"""Transfers between processes of one machine and over plain TCP."""
