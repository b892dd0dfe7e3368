"""What the NIXL-based backends share."""
