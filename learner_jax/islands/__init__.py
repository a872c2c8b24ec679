"""Islands: several learners of one run, which average their parameters after each step."""
