"""What a model makes of problems: solve rates, measured and written beside the rows."""
