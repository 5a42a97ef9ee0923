"""From a staged image to a committed checkpoint."""
