"""What the names in a spec stand for: seen on this machine, asked of the Hub, and compared."""
