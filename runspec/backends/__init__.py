"""Where a prepared site runs when it is not started by hand."""
